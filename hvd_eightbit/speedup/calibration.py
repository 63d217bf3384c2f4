"""What `measure` found about ranks and links, as a file."""

from __future__ import annotations

import dataclasses
import json
import pathlib

from hvd_eightbit.speedup.model import Cluster, Efficiency, Kernels, Link

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured kernels and links of a cluster."""

    cluster: Cluster
    kernels: Kernels

    def to_json(self) -> dict:
        """As plain dictionaries and numbers."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


def from_json(content: dict) -> Calibration:
    """The Calibration that `to_json` gave.

    Raises:
        KeyError, TypeError, ValueError: for anything else.
    """
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, but this version reads {FORMAT}")
    cluster = dict(content["cluster"])
    for name, kind in (("between", Link), ("within", Link), ("efficiency", Efficiency)):
        cluster[name] = kind(**cluster[name])
    return Calibration(Cluster(**cluster), Kernels(**content["kernels"]))


def load(path: str | pathlib.Path) -> Calibration:
    """Reads a file of `hvd-eightbit predict --measure`.

    Raises:
        ValueError: if it cannot be read as one.
    """
    try:
        return from_json(json.loads(pathlib.Path(path).read_text()))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"calibration={str(path)!r} is not a file that `hvd-eightbit predict --measure FILE` wrote: {error}"
        ) from None

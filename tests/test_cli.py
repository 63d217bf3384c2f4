"""The command line: what it prints, and what it says to impossible input."""

import json
import re
import subprocess
import sys

import launcher
import numpy as np
import pytest

from hvd_eightbit import cli
from hvd_eightbit.speedup import calibration, model


def run(capsys, *arguments):
    status = cli.main(arguments)
    output = capsys.readouterr()
    assert status == 0, output.err
    return output.out


def refused(capsys, *arguments):
    """What the command says on standard error; it ends with status 2."""
    try:
        status = cli.main(arguments)
    except SystemExit as end:  # argparse
        status = end.code
    assert status == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_predict_says_yes_and_no(capsys):
    slow = run(capsys, "predict", "--model", "resnet50", "--nodes", "8", "--bandwidth", "1", "--tflops", "10")
    assert re.search(r"^yes: \d\.\d\d times as fast as fp16", slow, re.M)
    assert re.search(r"^8 bits pay up to [\d.]+ Gbit/s between hosts", slow, re.M)
    fast = run(capsys, "predict", "--nodes", "8", "--bandwidth", "100", "--tflops", "10", "--batch", "64")
    assert re.search(r"^no: no faster than \w+ in practice", fast, re.M)
    alone = run(capsys, "predict", "--nodes", "1")
    assert "no: one rank alone sends nothing" in alone


def test_predict_points_to_a_better_algorithm(capsys):
    text = run(capsys, "predict", "--model", "vgg16", "--nodes", "8", "--ranks-per-node", "8")
    assert "no: " in text and "host's card" in text and "(--algorithm two_level: yes" in text


def test_predict_json_is_the_model(capsys):
    found = json.loads(run(capsys, "predict", "--model", "bert_large", "--nodes", "16", "--batch", "8", "--json"))
    assert found["setting"]["parameters"] == 335_141_888
    assert [p["method"] for p in found["predictions"]] == ["float32", "fp16", "flat", "allgather"]
    steps = {p["method"]: p["step"] for p in found["predictions"]}
    assert found["verdict"]["speedup"] == pytest.approx(min(steps["float32"], steps["fp16"]) / steps["flat"])
    assert found["break_even"]["bandwidth_gbit"] > 10


def test_predict_options_reach_the_model(capsys):
    def setting(*arguments):
        return json.loads(run(capsys, "predict", "--json", *arguments))["setting"]

    hosts = "--nodes 3 --ranks-per-node 2 --bandwidth 8 --latency 7 --call 9"
    cluster = setting(*hosts.split(), *"--within-bandwidth 80 --within-latency 2".split())["cluster"]
    assert (cluster["nodes"], cluster["ranks_per_node"]) == (3, 2)
    assert (cluster["between"]["bandwidth"], cluster["within"]["bandwidth"]) == (1e9, 1e10)
    assert (cluster["between"]["latency"], cluster["within"]["latency"], cluster["call"]) == (7e-6, 2e-6, 9e-6)
    assert setting("--compute-ms", "123")["compute_seconds"] == pytest.approx(0.123)
    assert setting("--kernels", "cpu")["kernels"]["quantize"] == model.KERNELS["cpu"].quantize


def test_predict_model_parallel(capsys):
    arguments = "predict --model alexnet --parallelism model --nodes 32 --ranks-per-node 3 --sub-batch 1024".split()
    text = run(capsys, *arguments)
    assert "flat" in text and "two_level" not in text and re.search("^(yes|no): ", text, re.M)


def test_predict_paper(capsys):
    text = run(capsys, "predict", "--paper")
    assert "50.64" in text and "37.6 (1024)" in text


def test_predict_reads_a_calibration(capsys, tmp_path):
    link = model.Link(2.5e8, 1e-4)
    measured = calibration.Calibration(
        model.Cluster(2, 2, link, link, 2e-3, model.Efficiency(alltoall=0.5), "ring"), model.KERNELS["cpu"]
    )
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(measured.to_json()))
    assert calibration.load(file) == measured
    setting = json.loads(run(capsys, "predict", "--json", "--calibration", str(file), "--nodes", "5"))["setting"]
    assert setting["cluster"]["nodes"] == 5 and setting["cluster"]["ranks_per_node"] == 2
    assert setting["cluster"]["between"] == {"bandwidth": 2.5e8, "latency": 1e-4}
    assert setting["cluster"]["efficiency"]["alltoall"] == 0.5 and setting["cluster"]["allreduce"] == "ring"
    assert setting["kernels"]["quantize"] == model.KERNELS["cpu"].quantize


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 99}', '{"format": 1, "cluster": {}, "kernels": {}}'])
def test_predict_refuses_other_files(capsys, tmp_path, content):
    file = tmp_path / "calibration.json"
    file.write_text(content)
    assert "predict --measure FILE" in refused(capsys, "predict", "--calibration", str(file))


def test_predict_reads_a_keras_file(capsys, tmp_path):
    keras = pytest.importorskip("tensorflow").keras
    model_ = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10, name="only")], name="tiny")
    model_.save(tmp_path / "tiny.keras")
    text = run(capsys, "predict", "--model", str(tmp_path / "tiny.keras"))
    assert text.startswith("tiny: 210 parameters")


def test_errors_json(capsys, tmp_path):
    np.save(tmp_path / "mine.npy", np.random.default_rng(0).standard_normal(5000))
    arguments = ["--file", str(tmp_path / "mine.npy"), "--data-type", "linear", "--block-size", "all", "--json"]
    (row,) = json.loads(run(capsys, "errors", *arguments))
    assert (row["data"], row["data_type"], row["block_size"], row["elements"]) == ("mine.npy", "linear", None, 5000)
    assert 0.002 < row["relative_l2"] < 0.02


def test_errors_table_has_a_line_for_each(capsys):
    lines = run(capsys, "errors", "--samples", "1000").splitlines()
    assert len(lines) == 1 + 4 * 4


def test_errors_paper(capsys):
    arguments = "errors --paper --distribution uniform:0,1 --data-type mantissa --samples 300000 --json".split()
    (row,) = json.loads(run(capsys, *arguments))
    assert 100 * row["mean_relative"] == pytest.approx(7.22, abs=0.05)
    assert (row["rounding"], row["normalization"], row["block_size"]) == ("paper", "paper", None)


def test_errors_of_zeros_are_valid_json(capsys, tmp_path):
    np.save(tmp_path / "zeros.npy", np.zeros(10))
    text = run(capsys, "errors", "--file", str(tmp_path / "zeros.npy"), "--json")
    assert "NaN" not in text and json.loads(text)[0]["mean_relative"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("predict --nodes 0", "--nodes: '0' is not an integer of at least 1"),
        ("predict --nodes 2.5", "--nodes: '2.5'"),
        ("predict --ranks-per-node -1", "--ranks-per-node: '-1'"),
        ("predict --bandwidth -10", "--bandwidth: '-10' is not a positive number"),
        ("predict --bandwidth inf", "--bandwidth: 'inf'"),
        ("predict --latency -1", "--latency: '-1' is not a number of at least 0"),
        ("predict --tflops 0", "--tflops: '0'"),
        ("predict --model lenet", "model='lenet' is not known: use one of alexnet, vgg16, resnet50, bert_large"),
        ("predict --model none.keras", "model='none.keras': no such file"),
        ("predict --block-size 3", "must be at least 16"),
        ("predict --block-size many", "'many': an integer, or all"),
        ("predict --algorithm two_level", "needs several hosts, with several ranks"),
        ("predict --sub-batch 128", "--sub-batch is for --parallelism model"),
        ("predict --parallelism model --model bert_large", "network='bert_large' must be one that ends in fully"),
        ("predict --parallelism model --sub-batch 1", "sub_batch=1 must be between 4"),
        ("predict --calibration none.json", "calibration='none.json'"),
        ("errors --distribution cauchy", "distribution='cauchy'"),
        ("errors --file none.npy", "none.npy cannot be read"),
        ("errors --samples 0", "--samples: '0'"),
        ("errors --data-type int8", "invalid choice: 'int8'"),
        ("plot", "invalid choice: 'plot'"),
    ],
)
def test_impossible_input_is_named(capsys, arguments, message):
    assert message in refused(capsys, *arguments.split())


@pytest.mark.parametrize("command", ["predict", "errors"])
def test_plot(capsys, tmp_path, monkeypatch, command):
    file = tmp_path / "plot.png"
    arguments = [command, "--plot", str(file), *(["--samples", "1000"] if command == "errors" else [])]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused(capsys, *arguments)
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    run(capsys, *arguments)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_predict_and_errors_need_neither_tensorflow_nor_horovod():
    code = (
        "import sys; sys.modules['tensorflow'] = sys.modules['horovod'] = None; from hvd_eightbit import cli; "
        "sys.exit(cli.main(['predict']) or cli.main(['errors', '--samples', '100']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_info_tells_what_there_is(capsys):
    found = json.loads(run(capsys, "info", "--json"))
    assert found["versions"]["python"] == ".".join(str(v) for v in sys.version_info[:3])
    assert set(found) == {"versions", "build", "horovod", "ops", "problems"}
    if "error" not in found["ops"]:
        assert "eight_bit_quantize" in found["ops"]["ops"] and "CPU" in found["ops"]["devices"]


def test_info_survives_what_is_missing(capsys, monkeypatch):
    def missing(name):
        raise cli.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cli.importlib.metadata, "version", missing)
    text = run(capsys, "info")
    assert "! TensorFlow is not installed: pip install tensorflow" in text
    assert "! Horovod does not work (not installed)" in text and "HOROVOD_WITH_TENSORFLOW=1" in text


@pytest.mark.parametrize("code", ["import none_such", "import os; os.abort()", "print('no json')", "exit(3)"])
def test_a_probe_that_dies_is_an_error_and_no_crash(code):
    assert cli._probe(code)["error"]


def test_info_names_broken_horovod_and_ops(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_probe", lambda code: {"error": "ImportError: it broke"})
    text = run(capsys, "info")
    assert text.count("it broke") == 2 and "all is well" not in text


def test_measure_alone_is_refused():
    command = [sys.executable, "-m", "hvd_eightbit.cli", "predict", "--measure", "none.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "one rank has nobody to talk to" in done.stderr or "not built" in done.stderr


def test_measure_on_two_ranks_gives_a_calibration(tmp_path, capsys):
    pytest.importorskip("horovod.tensorflow")
    file = tmp_path / "measured.json"
    done = launcher.launch(2, ["-m", "hvd_eightbit.cli", "predict", "--measure", str(file)], timeout=240)
    assert done.returncode == 0, done.stdout
    assert "written to" in done.stdout
    found = calibration.load(file)
    assert found.cluster.ranks == 2 and found.cluster.nodes == 1
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in json.loads(file.read_text())["checks"])
    assert "2 ranks on 1 hosts" in run(capsys, "predict", "--calibration", str(file))

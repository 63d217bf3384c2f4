# Not yet built to its end: no image of it has been tested.
# Two images of one file:
#   CPU   docker build -t hvd-eightbit .
#   GPU   docker build -t hvd-eightbit:gpu --build-arg BASE=nvcr.io/nvidia/tensorflow:25.02-tf2-py3 .
# A base that brings Horovod brings its TensorFlow too: then only this package is built, with CUDA where nvcc is.

ARG BASE=debian:bookworm-slim

# What runs: the system's packages and the user.
FROM ${BASE} AS runtime
USER root
RUN export DEBIAN_FRONTEND=noninteractive \
    && apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server tini \
        $(command -v horovodrun >/dev/null || echo openmpi-bin python3) \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    # Ubuntu's images have a user 1000 of their own. A home nobody else writes to is what sshd asks for.
    && { ! getent passwd 1000 >/dev/null || userdel --remove "$(getent passwd 1000 | cut -d: -f1)" 2>/dev/null; } \
    && useradd --uid 1000 --create-home --shell /bin/bash hvd \
    && install -d -o hvd -g hvd /work
ENV PATH=/opt/venv/bin:${PATH}

# What builds, and stays behind: the compiler, headers, CMake.
FROM runtime AS build
WORKDIR /build
ARG HOROVOD=0.28.1
RUN command -v horovodrun >/dev/null || { \
    apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ libopenmpi-dev make python3-dev python3-venv; }
COPY docker/requirements.txt docker/requirements-build.txt docker/
# TensorFlow first: Horovod is built against it. On a base that has both, the environment only looks through to them.
RUN if command -v horovodrun >/dev/null; then \
        python3 -m venv --system-site-packages --without-pip /opt/venv; \
    else \
        python3 -m venv /opt/venv \
        && pip install --no-cache-dir --no-deps -r docker/requirements.txt -r docker/requirements-build.txt \
        && HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
            HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 MAKEFLAGS=-j$(nproc) \
            pip install --no-cache-dir --no-build-isolation --no-deps --no-binary horovod horovod==${HOROVOD}; \
    fi
COPY . .
RUN python3 -m pip --python /opt/venv/bin/python install --no-cache-dir --no-build-isolation ".[demo]" \
    # What only builds need: two fifths of TensorFlow's size are headers and tests.
    && if [ -e /opt/venv/bin/pip ]; then pip uninstall -y -r docker/requirements-build.txt; fi \
    && rm -rf /opt/venv/lib/python3*/site-packages/tensorflow/include \
    && find /opt/venv -name __pycache__ -prune -exec rm -r {} +

FROM runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="hvd_eightbit" \
      org.opencontainers.image.description="8-bit gradients and activations for TensorFlow on Horovod" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY docker/openmpi-mca-params.conf /etc/openmpi/openmpi-mca-params.conf
COPY docker/ssh_config /etc/ssh/ssh_config.d/hvd_eightbit.conf
COPY docker/sshd_config docker/start LICENSE /opt/hvd_eightbit/
COPY examples /opt/hvd_eightbit/examples
COPY --from=build /opt/venv /opt/venv
# An image in which something does not load is not made.
USER hvd
RUN hvd-eightbit info > /tmp/info && cat /tmp/info && grep -q "all is well" /tmp/info && rm /tmp/info
WORKDIR /work
HEALTHCHECK --interval=10m --timeout=2m --start-period=30s CMD hvd-eightbit info | grep -q "all is well"
ENTRYPOINT ["tini", "-g", "--", "/opt/hvd_eightbit/start"]

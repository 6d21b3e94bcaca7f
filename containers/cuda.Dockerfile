# Phalanx for NVIDIA GPUs: docker build --file containers/cuda.Dockerfile --tag phalanx:cuda .
#   docker run --gpus all --ipc host --volume "$PWD:/work" phalanx:cuda doctor --nproc 8
FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=

# Triton compiles a small launcher with the C compiler; the headers of Python are for it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/phalanx/bin:$PATH

# PyTorch in a layer of its own: it is large, and changes less often than Phalanx. TORCH has its version.
# hadolint ignore=DL3013
RUN python3 -m venv /opt/phalanx \
    && pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"

COPY constraints.txt dist/*.whl /tmp/wheel/
RUN pip install --no-cache-dir --constraint /tmp/wheel/constraints.txt \
        "$(echo /tmp/wheel/phalanx_train-*.whl)[data,weather,materials,search]" \
    && phalanx --version

WORKDIR /work
ENTRYPOINT ["phalanx"]
CMD ["--help"]

# syntax=docker/dockerfile:1
# quire for NVIDIA GPUs (compute capability 8.0 or later). From the root of a checkout:
# docker build -f deploy/container/cuda.Dockerfile -t quire:0.1.0-cuda .
FROM python:3.12.11-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH
# The wheel on PyPI brings the CUDA libraries. The node has the driver, and the NVIDIA container runtime mounts it.
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --index-url ${TORCH_INDEX} torch==2.13.0
WORKDIR /source
COPY . .
# The kernels are compiled for every instruction set; the best one that the node can run is chosen at the start.
# Without this check an image whose kernels failed to compile would be built, and would be slow.
RUN pip install '.[server,gpu,grammar]' \
    && cd / && python -c "from quire.kernels.cpu import _native; print(_native.isa())"

FROM python:3.12.11-slim-bookworm
# libgomp1: OpenMP of the native kernels. gcc and libc6-dev: Triton compiles a launcher for each kernel at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 quire \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin quire
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /home/quire
EXPOSE 8000
ENTRYPOINT ["quire"]
CMD ["serve", "--host", "0.0.0.0"]

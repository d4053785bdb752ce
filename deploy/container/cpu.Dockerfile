# syntax=docker/dockerfile:1
# quire for CPUs. From the root of a checkout: docker build -f deploy/container/cpu.Dockerfile -t quire:0.1.0 .
FROM python:3.12.11-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH
# The index of PyTorch has a build without CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --index-url ${TORCH_INDEX} torch==2.13.0
WORKDIR /source
COPY . .
# The kernels are compiled for every instruction set; the best one that the node can run is chosen at the start.
# Without this check an image whose kernels failed to compile would be built, and would be slow.
RUN pip install '.[server,grammar]' \
    && cd / && python -c "from quire.kernels.cpu import _native; print(_native.isa())"

FROM python:3.12.11-slim-bookworm
# libgomp1: OpenMP of the native kernels.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 quire \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin quire
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /home/quire
EXPOSE 8000
ENTRYPOINT ["quire"]
CMD ["serve", "--host", "0.0.0.0"]

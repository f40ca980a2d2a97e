# kvferry's services on NVIDIA GPUs; build context: the repository's root.

# The smallest CUDA base: torch's wheels bring the libraries (cuBLAS, cuDNN, NCCL) of larger ones.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS runtime
# What constraints-gpu.txt needs: on a driver older than 580 the container toolkit does not start the container.
ENV NVIDIA_REQUIRE_CUDA="cuda>=13.0"
# Triton compiles a launcher for each kernel when it is first used, so a C compiler, libc's and Python's headers
# belong to what runs. The versions are those of the base's release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 libpython3-dev gcc libc6-dev ca-certificates openssl \
    && rm -rf /var/lib/apt/lists/*

FROM runtime AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1
WORKDIR /src
COPY pyproject.toml constraints.txt constraints-gpu.txt docker/requirements.py ./
RUN python3 -m venv /opt/kvferry \
    && python3 requirements.py gpu > requirements.txt \
    && grep -v -E '^(torch|triton)==' constraints.txt > constraints-others.txt \
    && /opt/kvferry/bin/pip install --quiet --no-compile -c constraints-gpu.txt -c constraints-others.txt -r requirements.txt
COPY README.md LICENSE ./
COPY baselines baselines
COPY kernels kernels
COPY models models
COPY proto proto
COPY services services
COPY shared shared
COPY src src
COPY tools tools
# Bytecode is made of what the services import: thousands of modules, such as transformers' models, are left out.
RUN /opt/kvferry/bin/pip install --quiet --no-compile --no-deps --no-build-isolation . \
    && /opt/kvferry/bin/pip uninstall --quiet --yes pip \
    && /opt/kvferry/bin/python -c "import importlib; from kvferry.services.launcher.process import SHARED_IMPORTS; \
        [importlib.import_module(name) for name in SHARED_IMPORTS]"
# Kernels are compiled here, which needs no GPU, so that a first start need not. Any model has those of its heads'
# shape; what is missing is compiled when a worker starts.
ARG KERNEL_SHAPES=all
ARG KERNEL_ARCHITECTURES=all
RUN HOME=/tmp /opt/kvferry/bin/kvferry compile --shapes "$KERNEL_SHAPES" --architectures "$KERNEL_ARCHITECTURES" \
    --folder /opt/kvferry/share/kvferry/triton

FROM runtime
LABEL org.opencontainers.image.title="kvferry" \
      org.opencontainers.image.description="Router, prefill and decode services, NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      kvferry.least-nvidia-driver="580"
# /models is the cache of downloaded models. The folders exist so that volumes mounted there belong to the user.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /models kvferry \
    && install -d -o kvferry -g kvferry /models /run/kvferry /run/kvferry/places /run/kvferry/worker \
        /run/kvferry/redis /run/kvferry/monitoring /run/kvferry/certs /run/kvferry/certs/router \
        /run/kvferry/certs/prefill /run/kvferry/certs/decode /run/kvferry/certs/metrics
COPY --from=build /opt/kvferry /opt/kvferry
COPY docker/entrypoint.sh /usr/local/bin/container-entrypoint
COPY docker/first-start.sh docker/healthcheck.py docker/sbom.py /usr/local/lib/kvferry/
# HOME: libraries write caches below it, and the root file system is read-only. Triton reads what was compiled above,
# and keeps what it compiles itself beside the models, so that a restart need not compile again.
ENV PATH=/opt/kvferry/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp HF_HOME=/models \
    TRITON_CACHE_DIR=/models/triton TRITON_CACHE_MANAGER=kvferry.kernels.prebuilt_cache:PrebuiltCache
RUN python /usr/local/lib/kvferry/sbom.py > /usr/local/lib/kvferry/sbom.cdx.json
USER 10001:10001
VOLUME /models
HEALTHCHECK --interval=5s --timeout=10s --start-period=600s --retries=3 \
    CMD ["python", "-I", "/usr/local/lib/kvferry/healthcheck.py"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["container-entrypoint"]
CMD ["router"]

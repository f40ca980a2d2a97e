# kvferry's services on CPU; build context: the repository's root.

# Of the same release as what runs, and with a C compiler.
FROM python:3.11.13-bookworm AS build
# PyPI's torch brings CUDA; PyTorch's own index has the CPU build. Empty: only pip's own configuration.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1
WORKDIR /src
COPY pyproject.toml constraints.txt docker/requirements.py ./
RUN python -m venv /opt/kvferry \
    && python requirements.py > requirements.txt \
    && /opt/kvferry/bin/pip install --quiet --no-compile -c constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements.txt
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
# What runs has no C compiler. Empty: attention and products are torch's there, at a fraction of the speed.
ARG NATIVE=all
RUN [ -z "$NATIVE" ] || /opt/kvferry/bin/python -c "from kvferry.kernels.native.library import prebuild; prebuild()"

FROM python:3.11.13-slim-bookworm
LABEL org.opencontainers.image.title="kvferry" \
      org.opencontainers.image.description="Router, prefill and decode services, CPU" \
      org.opencontainers.image.licenses="Apache-2.0"
# /models is the cache of downloaded models. The folders exist so that volumes mounted there belong to the user.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /models kvferry \
    && install -d -o kvferry -g kvferry /models /run/kvferry /run/kvferry/places /run/kvferry/worker \
        /run/kvferry/redis /run/kvferry/monitoring /run/kvferry/certs /run/kvferry/certs/router \
        /run/kvferry/certs/prefill /run/kvferry/certs/decode /run/kvferry/certs/metrics
COPY --from=build /opt/kvferry /opt/kvferry
COPY docker/entrypoint.sh /usr/local/bin/container-entrypoint
COPY docker/first-start.sh docker/healthcheck.py docker/sbom.py /usr/local/lib/kvferry/
# HOME: libraries write caches below it, and the root file system is read-only.
ENV PATH=/opt/kvferry/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp HF_HOME=/models
RUN python /usr/local/lib/kvferry/sbom.py > /usr/local/lib/kvferry/sbom.cdx.json
USER 10001:10001
VOLUME /models
HEALTHCHECK --interval=5s --timeout=10s --start-period=300s --retries=3 \
    CMD ["python", "-I", "/usr/local/lib/kvferry/healthcheck.py"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["container-entrypoint"]
CMD ["router"]

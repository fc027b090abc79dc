# The service, the monitor and every other command, as an ordinary user and without any secret.
# Checked by hadolint, and never built where it was written, so that no digest is known here. The
# build requires the one that you trust:
#   docker buildx imagetools inspect python:3.12-slim-bookworm
#   docker build --build-arg BASE=python:3.12-slim-bookworm@sha256:… .
ARG BASE
# hadolint ignore=DL3006
FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all:
RUN python -m venv /opt/ctxguard
ENV PATH=/opt/ctxguard/bin:$PATH
WORKDIR /src
COPY locks/ locks/
RUN pip install --require-hashes --no-deps -r locks/torch.txt \
    && pip install --require-hashes --no-deps -r locks/image.txt
COPY pyproject.toml README.md LICENSE ./
COPY ctxguard/ ctxguard/
COPY calibration/ calibration/
COPY haystack_integrations/ haystack_integrations/
# Everything that it needs is there.
RUN pip install --no-build-isolation --no-deps .

# hadolint ignore=DL3006
FROM ${BASE}
COPY --from=build /opt/ctxguard /opt/ctxguard
RUN groupadd --gid 10001 ctxguard \
    && useradd --uid 10001 --gid 10001 --no-log-init --create-home --home-dir /data ctxguard
ENV PATH=/opt/ctxguard/bin:$PATH HF_HUB_OFFLINE=1 XDG_CACHE_HOME=/data/cache PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /data
EXPOSE 8765
ENTRYPOINT ["ctxguard"]
CMD ["serve", "--host", "0.0.0.0"]

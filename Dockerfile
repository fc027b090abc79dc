# The service, the monitor and every other command, as an ordinary user and without any secret.
# Checked by hadolint, and never built where it was written. Pin the base by the digest that you
# trust: docker buildx imagetools inspect python:3.12-slim-bookworm
FROM python:3.12-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all:
RUN python -m venv /opt/ctxguard
ENV PATH=/opt/ctxguard/bin:$PATH
WORKDIR /src
COPY locks/ locks/
RUN pip install --require-hashes --no-deps -r locks/torch.txt \
    && pip install --require-hashes --no-deps -r locks/all.txt
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY ctxguard/ ctxguard/
COPY calibration/ calibration/
COPY haystack_integrations/ haystack_integrations/
# Versions of these extras are pinned, but not their hashes.
RUN pip install --no-build-isolation --constraint constraints.txt ".[judge,mcp,postgres]"

FROM python:3.12-slim-bookworm
COPY --from=build /opt/ctxguard /opt/ctxguard
RUN groupadd --gid 10001 ctxguard \
    && useradd --uid 10001 --gid 10001 --no-log-init --create-home --home-dir /data ctxguard
ENV PATH=/opt/ctxguard/bin:$PATH HF_HUB_OFFLINE=1 XDG_CACHE_HOME=/data/cache PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /data
EXPOSE 8765
ENTRYPOINT ["ctxguard"]
CMD ["serve", "--host", "0.0.0.0"]

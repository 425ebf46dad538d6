# One image for every service of docker-compose.yml: `chorus engine`, `chorus gateway`, `chorus migrate`, `chorus serve`.
#   docker build --build-arg TORCH=cpu|cuda -t chorus .
FROM python:3.12-slim-bookworm AS build
ARG TORCH=cpu
WORKDIR /chorus
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && python -m venv /venv \
    && version=$(sed -n 's/^torch==//p' constraints.txt) \
    && if [ "$TORCH" = cpu ]; then index="--index-url https://download.pytorch.org/whl/cpu"; else index=; fi \
    && /venv/bin/pip install --no-cache-dir -c constraints.txt $index "torch==$version"
COPY chorus chorus
COPY gateway gateway
COPY engine engine
COPY adapters adapters
COPY tenants tenants
COPY migrations migrations
RUN /venv/bin/pip install --no-cache-dir -c constraints.txt . && cd / && /venv/bin/python -m engine.ops.compile

FROM python:3.12-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends redis-server \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /data chorus \
    && install -d -o chorus -m 0700 /data
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 CHORUS_DATA_DIR=/data
USER chorus
WORKDIR /data
VOLUME /data
EXPOSE 8000
ENTRYPOINT ["chorus"]
CMD ["serve", "--host", "0.0.0.0", "--model", "smollm2-135m-instruct"]

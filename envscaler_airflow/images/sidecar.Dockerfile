# The sidecar image: the sidecar, and the agent's files for the training's container.
# `envscaler images build-sidecar` lays out the folder that this file is built in.
#
# BASE is what runs: python3 3.11 or newer and certificates, nothing more. It may be made of Debian's
# packages alone, by mmdebstrap; PIP is then a wheel of pip that the build can read.
ARG BASE=docker.io/library/python:3.12-slim

FROM ${BASE} AS build
ARG PIP="-m pip"
# Other stores by fsspec: "gcsfs", "adlfs", "ossfs".
ARG EXTRA_REQUIREMENTS=""
# Where packages come from, as pip reads it from its environment.
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
COPY requirements.txt /tmp/requirements.txt
RUN python3 ${PIP} install --no-cache-dir --disable-pip-version-check --no-compile \
      --target /opt/envscaler --requirement /tmp/requirements.txt ${EXTRA_REQUIREMENTS} \
    && rm -rf /opt/envscaler/bin
COPY packages /opt/envscaler
RUN python3 -m compileall -q -j 1 /opt/envscaler

FROM ${BASE}
COPY --from=build /opt/envscaler /opt/envscaler
ENV PYTHONPATH=/opt/envscaler PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python3", "-m", "envscaler_airflow.backends.kubernetes.pod_sidecar"]

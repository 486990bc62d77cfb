# The sidecar image: the sidecar, and the agent's files for the training's container.
# `envscaler images build-sidecar` lays out the folder that this file is built in.
#
# BASE is what runs: python3 3.11 or newer and certificates, nothing more. It may be made of Debian's
# packages alone, by mmdebstrap; PIP is then a wheel of pip that the build can read.
ARG BASE=docker.io/library/python:3.12-slim

FROM ${BASE} AS build
ARG PIP="-m pip"
# Other stores by fsspec: "gcsfs", "adlfs", "ossfs"; pin them yourself, with `name==version`.
ARG EXTRA_REQUIREMENTS=""
# Where packages come from, as pip reads it from its environment.
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
COPY requirements.txt /tmp/requirements.txt
# Every file that is installed has the hash that requirements.txt says. The other stores may need the same
# packages: these are there already, in the same versions.
RUN set -e; install="python3 ${PIP} install --no-cache-dir --disable-pip-version-check --no-compile --target /opt/envscaler"; \
    $install --require-hashes --only-binary :all: --requirement /tmp/requirements.txt; \
    if [ -n "${EXTRA_REQUIREMENTS}" ]; then \
      sed -e 's/ \\$//' -e '/--hash=/d' /tmp/requirements.txt > /tmp/constraints.txt; \
      $install --constraint /tmp/constraints.txt ${EXTRA_REQUIREMENTS}; \
    fi; \
    rm -rf /opt/envscaler/bin
COPY packages /opt/envscaler
RUN python3 -m compileall -q -j 1 /opt/envscaler

FROM ${BASE}
COPY --from=build /opt/envscaler /opt/envscaler
ENV PYTHONPATH=/opt/envscaler PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python3", "-m", "envscaler_airflow.backends.kubernetes.pod_sidecar"]

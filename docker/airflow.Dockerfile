# Airflow with this provider: one image for API server, scheduler, triggerer and DAG processor.
#
#   docker build --file docker/airflow.Dockerfile --tag envscaler/airflow:latest .
#
# BASE needs python3 3.11 or newer with certificates and time zones. It may be made of Debian's packages
# alone, by mmdebstrap; PIP is then a wheel of pip that the build can read. To add the provider to an
# Airflow image of your own, install the package there instead: see docs/how-to/run-with-docker.md.
ARG BASE=docker.io/library/python:3.12-slim

FROM ${BASE} AS build
ARG PIP="-m pip"
# Of this package besides amazon and kubernetes; see [project.optional-dependencies] in pyproject.toml.
ARG EXTRAS=""
# What your DAGs import besides; pin it yourself, with `name==version`.
ARG EXTRA_REQUIREMENTS=""
# Where packages come from, as pip reads it from its environment.
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE /src/
COPY agent /src/agent
COPY dags /src/dags
COPY envscaler_airflow /src/envscaler_airflow
COPY docker/requirements.txt /src/docker/requirements.txt
# Every file that is installed has the hash that requirements.txt says; hatchling, which builds the package,
# is among them. What the extras need of these is there already, in the same versions.
RUN set -e; install="python3 ${PIP} install --no-cache-dir --disable-pip-version-check --no-compile"; \
    $install --target /opt/envscaler --require-hashes --only-binary :all: --requirement /src/docker/requirements.txt; \
    PYTHONPATH=/opt/envscaler $install --target /tmp/own --no-build-isolation --no-deps /src; \
    cp -rn /tmp/own/. /opt/envscaler/; \
    if [ -n "${EXTRAS}${EXTRA_REQUIREMENTS}" ]; then \
      $install --target /tmp/more --constraint /src/constraints.txt "/src[${EXTRAS:-amazon}]" ${EXTRA_REQUIREMENTS}; \
      cp -rn /tmp/more/. /opt/envscaler/; \
    fi; \
    python3 -m compileall -q -j 0 /opt/envscaler

FROM ${BASE}
COPY --from=build /opt/envscaler /opt/envscaler
# Owned by group 0 and writable for it: platforms that choose the user themselves keep that group. Airflow
# wants its user to have a name, which USER in the environment is for one that is not in /etc/passwd.
RUN echo "airflow:x:50000:0::/opt/airflow:/bin/sh" >> /etc/passwd \
    && mkdir -p /opt/airflow/dags /var/lib/envscaler \
    && chown -R 50000:0 /opt/airflow /var/lib/envscaler && chmod -R g=u /opt/airflow /var/lib/envscaler
ENV PYTHONPATH=/opt/envscaler PATH=/opt/envscaler/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/opt/airflow USER=airflow AIRFLOW_HOME=/opt/airflow
USER 50000:0
WORKDIR /opt/airflow
EXPOSE 8080
ENTRYPOINT ["airflow"]
CMD ["version"]

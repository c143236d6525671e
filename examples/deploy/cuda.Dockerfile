# Not built here.
FROM python:3.12.11-slim-bookworm
# Triton compiles a stub of the driver in C when the first kernel runs.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 ltx2rt && mkdir /data && chown ltx2rt /data
RUN pip install --no-cache-dir torch==2.13.0
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir '.[cuda,hub,serve]'
USER ltx2rt
WORKDIR /data
VOLUME /data
EXPOSE 8000
# A SIGTERM lets running jobs end (--drain): give `docker stop --time` more than that. Several GPUs
# exchange over shared memory: `docker run --gpus all --shm-size 8g`.
ENTRYPOINT ["ltx2rt"]
CMD ["serve", "--help"]

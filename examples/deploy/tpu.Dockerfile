# Not built here.
FROM python:3.12.11-slim-bookworm
RUN useradd --create-home --uid 1000 ltx2rt && mkdir /data && chown ltx2rt /data
RUN pip install --no-cache-dir 'jax[tpu]==0.10.2'
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir '.[tpu,hub,serve]'
USER ltx2rt
WORKDIR /data
VOLUME /data
EXPOSE 8000
# A SIGTERM lets running jobs end (--drain): give `docker stop --time` more than that.
ENTRYPOINT ["ltx2rt"]
CMD ["serve", "--help"]

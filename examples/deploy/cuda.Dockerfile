# Not built here.
FROM python:3.12-slim
RUN useradd --create-home --uid 1000 ltx2rt && mkdir /data && chown ltx2rt /data
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir '.[cuda,hub,serve]'
USER ltx2rt
WORKDIR /data
VOLUME /data
EXPOSE 8000
# A SIGTERM lets running jobs end (--drain): give `docker stop --time` more than that.
ENTRYPOINT ["ltx2rt"]
CMD ["serve", "--help"]

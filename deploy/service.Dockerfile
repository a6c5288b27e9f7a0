# A container that serves one finished run, from the image of deploy/Dockerfile. The run is a volume; tokens come from the
# environment or from files. Without tokens it refuses to listen beyond its own loopback.
#
#     docker build --file deploy/service.Dockerfile --build-arg IMAGE=REGISTRY/fairpate@sha256:DIGEST \
#         --tag REGISTRY/fairpate-service:0.1.0 .
#     docker run --init --shm-size 2g --publish 127.0.0.1:8517:8517 --volume /srv/fairpate/RUN:/run/fairpate \
#         --volume fairpate-state:/state --env-file tokens.env REGISTRY/fairpate-service:0.1.0
# DIGEST: what `docker push` printed for the image of deploy/Dockerfile.
ARG IMAGE
FROM $IMAGE
ARG IMAGE
RUN case "$IMAGE" in *@sha256:*) ;; *) echo "IMAGE: expected NAME@sha256:DIGEST, got $IMAGE" >&2; exit 1 ;; esac
ENV FAIRPATE_STATE=/state RAY_USAGE_STATS_ENABLED=0
EXPOSE 8517
# Alive, not ready: a container that is not ready yet, or waits for its disk, must not be started anew.
HEALTHCHECK --interval=30s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8517/livez', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["fairpate", "serve"]
CMD ["/run/fairpate", "--host", "0.0.0.0", "--log-file", "/proc/1/fd/1"]

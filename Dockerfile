# initwarm on top of the serving image, so that what it tunes is tuned in the server's own environment.
#
#   docker build --build-arg BASE_IMAGE=<the serving image, by digest> -t <registry>/initwarm:<tag> .
#
# The base needs Python 3.10 to 3.13 as python3 with PyYAML, torch and FlashInfer; a serving image has them. Nothing is
# installed into its Python: no wheel is added to those that make up the identity of a cache, and no network is needed.
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS warm

LABEL org.opencontainers.image.title="initwarm" \
      org.opencontainers.image.description="Tunes FlashInfer's kernels before an LLM server starts" \
      org.opencontainers.image.licenses="Apache-2.0"

COPY LICENSE /opt/initwarm/LICENSE
COPY --chmod=0755 scripts/launcher /usr/local/bin/initwarm
COPY initwarm /opt/initwarm/initwarm

# Readable by any user; compiled now, since a read-only root could not keep the result; and seen to start.
RUN chmod -R a+rX /opt/initwarm && python3 -m compileall -q /opt/initwarm && initwarm --help >/dev/null

USER 65532:65532
ENTRYPOINT ["initwarm"]
CMD ["--help"]

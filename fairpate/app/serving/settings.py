"""How a service is to be reached, from the options of `fairpate serve`: each is checked before anything starts."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from aggregator.ledger.own_limits import QuotaRule
from aggregator.service.api import ServiceSettings, TlsFiles
from aggregator.service.oidc import OidcConfig
from aggregator.service.rates import RequestRate
from aggregator.service.tokens import read_tokens
from fairpate.app.extras import require_extra
from fairpate.config_reader import parse_config, read_yaml

_DAY_S = 86400.0


def service_settings(
    *,
    host: str,
    port: int,
    analyst_file: Path | None,
    operator_file: Path | None,
    daily_quota: float,
    rate: float = math.inf,
    tls: tuple[Path | None, Path | None] = (None, None),
    log_file: Path | None = None,
    traces: bool = False,
    oidc: Path | None = None,
) -> ServiceSettings:
    """Where to listen and for whom: tokens of files or the environment, beside the token store of each run.

    ``oidc``: a file that names an issuer whose tokens are good besides. TokenError for a bad token, ConfigError for a
    bad file, ValueError for files of TLS that do not go together, and for a package that is missing.
    """
    if traces:
        require_extra("traces", "--traces")
    tokens = read_tokens(os.environ, analyst_file=analyst_file, operator_file=operator_file)
    tokens = replace(tokens, oidc=_issuer(oidc))
    return ServiceSettings(
        host=host,
        port=port,
        tokens=tokens,
        quota=QuotaRule(max_queries=daily_quota, period_s=_DAY_S),
        # A bucket that holds less than one request would let none in, however long the caller waits.
        rate=RequestRate(per_s=rate, burst=max(1.0, 2 * rate)),
        tls=_tls_files(*tls),
        log_file=_writable(log_file),
        traces=traces,
    )


def _issuer(path: Path | None) -> OidcConfig | None:
    if path is None:
        return None
    require_extra("oidc", "--oidc")
    return parse_config(read_yaml(path), OidcConfig)


def _tls_files(cert: Path | None, key: Path | None) -> TlsFiles | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ValueError("--tls-cert and --tls-key: expected both, got one; give both, or let a proxy end TLS.")
    return TlsFiles(cert=cert.absolute(), key=key.absolute())


def _writable(log_file: Path | None) -> Path | None:
    if log_file is not None:
        try:
            log_file.open("a", encoding="utf-8").close()
        except OSError as error:
            raise ValueError(f"--log-file: {log_file} cannot be written ({error}); give another file.") from error
        log_file = log_file.absolute()
    return log_file

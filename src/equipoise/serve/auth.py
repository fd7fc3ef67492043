"""API keys, compared in constant time, and the TLS context."""

import hmac
import ssl
from collections.abc import Mapping
from itertools import product

from equipoise.hal.errors import UsageError
from equipoise.serve.headers import API_KEY_HEADER
from equipoise.serve.outcomes import ErrorResponse, RequestOutcome, RequestRefused
from equipoise.serve.settings import AccessSettings

LOOPBACK = ("127.0.0.1", "::1", "localhost")
CHALLENGE = {"WWW-Authenticate": "Bearer"}


def check_key(access: AccessSettings, headers: Mapping[str, str]) -> None:
    """Raises RequestRefused (401) where a key is needed and the client sends none of them.

    OpenAI's clients send it as `Authorization: Bearer KEY`, Anthropic's as `x-api-key: KEY`.
    """
    if not access.keys:
        return
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    texts = (token if scheme.lower() == "bearer" else "", headers.get(API_KEY_HEADER, ""))
    keys_sent = [text.strip().encode("utf-8", "surrogateescape") for text in texts]
    # Every key is compared, so that the time does not say which one was near.
    fits = [
        hmac.compare_digest(sent, key.encode()) for sent, key in product(keys_sent, access.keys)
    ]
    if not any(fits):
        message = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        raise RequestRefused(
            ErrorResponse(401, RequestOutcome.UNAUTHORIZED, message, "invalid_api_key", CHALLENGE)
        )


def _reason(error: OSError | ValueError) -> str:
    """Without the number that Python puts before the text of an error of the system."""
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    return str(error)


def tls_context(access: AccessSettings) -> ssl.SSLContext | None:
    """None where none is asked for. Raises UsageError for files that cannot be taken."""
    if access.certificate is None:
        return None
    for flag, file in (("--tls-cert", access.certificate), ("--tls-key", access.private_key)):
        if file is not None and file.is_fifo():
            # OpenSSL would wait for a writer, deaf to signals.
            raise UsageError(f"{flag} {file}: is a pipe, not a file")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a phrase: a key that needs one would ask the terminal, and wait for ever.
        context.load_cert_chain(access.certificate, access.private_key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise UsageError(f"--tls-cert {access.certificate}: {_reason(error)}") from error
    return context


def open_to_all(access: AccessSettings) -> bool:
    """Whether clients on other machines could send requests without a key."""
    return access.host not in LOOPBACK and not access.keys

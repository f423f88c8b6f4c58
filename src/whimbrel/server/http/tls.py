"""TLS certificates of the server."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from whimbrel.errors import SetupError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate chain and its private key, in PEM files."""

    certfile: str
    keyfile: str | None = None
    """None: the key is in `certfile`."""
    password: str | None = field(default=None, repr=False)
    """The password of an encrypted key."""

    def load(self) -> ssl.SSLContext:
        """Return the context of a server with these files, as they are now. Raises SetupError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        for file in (self.certfile, self.keyfile or self.certfile):
            try:
                Path(file).read_bytes()
            except OSError as error:
                raise SetupError(f"cannot read {file}: {error.strerror or error}.") from None
        try:  # without a password, OpenSSL would ask the terminal for it
            context.load_cert_chain(self.certfile, self.keyfile, password=lambda: self.password or "")
        except ssl.SSLError as error:
            raise SetupError(
                f"{self._describe(error)}.", hint="both are PEM files: the chain, server first, and its key"
            ) from None
        return context

    def _describe(self, error: ssl.SSLError) -> str:
        key = self.keyfile or self.certfile
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"the key in {key} does not fit the certificate in {self.certfile}"
        if b"ENCRYPTED" in Path(key).read_bytes():
            return f"the key in {key} is encrypted, and ssl_keyfile_password is {'wrong' if self.password else 'missing'}"
        return f"{self.certfile} and {key} hold no certificate with its key ({error.reason or 'unreadable'})"


def read_tls_files(certfile: Path | None, keyfile: Path | None, password: str | None) -> TlsFiles | None:
    """Return the files that the options name, after a try to load them; None without a certificate. Raises SetupError."""
    if certfile is None:
        if keyfile is not None or password is not None:
            raise SetupError("a TLS key needs its certificate.", hint="add ssl_certfile")
        return None
    files = TlsFiles(str(certfile.absolute()), None if keyfile is None else str(keyfile.absolute()), password)
    files.load()
    return files

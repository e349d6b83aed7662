"""From where pictures, videos and sound may be fetched: URLs are read once, and host names are resolved once, so that no check sees another
place than the fetch.

Knows URLs and IP addresses. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from quire.frontend.media.errors import not_fetched, refused

PORTS = {"http": 80, "https": 443}
MOST_URL = 8192
HOST = re.compile(r"[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class WebAddress:
    """A URL, read. `target`: path and query as the request line has them."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def host_header(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == PORTS[self.scheme] else f"{name}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host_header}{self.target}"


def read_url(url: str, where: str) -> WebAddress:
    """Raises ValidationError: not an http or https URL; one with a user name, a backslash, a space or control characters."""
    if len(url) > MOST_URL:
        raise refused(where, f"the URL has {len(url)} characters; the limit is {MOST_URL}")
    if "\\" in url or any(char <= " " or char == "\x7f" for char in url):
        raise refused(
            where, "the URL has a backslash, a space or a control character: percent-encode it"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise refused(where, "this is not a URL") from None
    if parts.scheme not in PORTS:
        raise refused(where, "the URL must begin with data:, http:// or https://")
    host = parts.netloc.rpartition(":")[0] if port is not None else parts.netloc.removesuffix(":")
    if "@" in parts.netloc or not HOST.fullmatch(host):
        raise refused(
            where, "the URL must have a host of letters, digits, dots and hyphens, and no user name"
        )
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        target += "?" + quote(parts.query, safe="/?%:@!$&'()*+,;=~-._[]")
    return WebAddress(parts.scheme, host.strip("[]").lower(), port or PORTS[parts.scheme], target)


def check_domain(address: WebAddress, domains: Collection[str], where: str) -> None:
    """Raises ValidationError: --allowed-media-domains does not list the host."""
    if domains and address.host not in {domain.lower() for domain in domains}:
        raise refused(where, "this server fetches nothing from this host (--allowed-media-domains)")


async def resolve(address: WebAddress, is_listed: bool, where: str) -> tuple[int, str]:
    """(family, IP address) of the host, to which the connection must go. `is_listed`: in --allowed-media-domains, so any
    address is allowed; else all of the host's addresses must be public.

    Raises:
        NotFetched: the host is unknown. ValidationError: it has an address that is not public.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise not_fetched(where, "the host of the URL is unknown") from None
    if not is_listed and not all(is_public(str(place[0])) for *_, place in found):
        raise refused(
            where,
            "the host of the URL is not in the public internet; --allowed-media-domains can list it",
        )
    family, *_, place = found[0]
    return family, str(place[0])


def is_public(ip: str) -> bool:
    """Whether an address belongs to the public internet; of one that contains another, also the other."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(one is not None and not is_public(str(one)) for one in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast and not address.is_reserved

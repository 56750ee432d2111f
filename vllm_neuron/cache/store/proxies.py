"""Which proxy a store over a network is asked through: as ``http_proxy``, ``all_proxy``, ``no_proxy``… say."""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from vllm_neuron.errors import ConfigError


def proxy_for(url: str) -> str | None:
    """The URL of the proxy for ``url``, with user and password if it has any; None where it is asked directly.

    The variable of the URL's scheme comes before ``all_proxy``. Raises ``ConfigError`` for a proxy that is no HTTP one.
    """
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or _bypassed(parts.hostname or "", parts.netloc.rpartition("@")[2], proxies.get("no", "")):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    try:
        usable = urlsplit(proxy).scheme in ("http", "https") and urlsplit(proxy).hostname and urlsplit(proxy).port != 0
    except ValueError:  # A port that is no number.
        usable = False
    if not usable:
        raise ConfigError(
            f"the proxy {proxy_name(proxy)} of the variables {parts.scheme}_proxy and all_proxy can't be used for "
            f"{parts.hostname}; accepted: http://host:port, with or without user:password@; or its host in no_proxy"
        )
    return proxy


def proxy_name(proxy: str) -> str:
    """A proxy as messages call it: without user and password."""
    scheme, _, rest = proxy.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].rstrip('/')}"


def proxy_login(proxy: str) -> str | None:
    """``user:password`` of a proxy, as they are; None where it has none."""
    login = urlsplit(proxy).netloc.rpartition("@")[0]
    return unquote(login) or None


def s3_proxies(endpoint: str) -> dict[str, Any]:
    """What boto is to be told of proxies: it reads the variables by itself, but for ``all_proxy``."""
    proxies = getproxies()
    scheme = urlsplit(endpoint).scheme
    if scheme in proxies or "all" not in proxies or (proxy := proxy_for(endpoint)) is None:
        return {}
    return {"proxies": {scheme: proxy}}


def _bypassed(host: str, place: str, no_proxy: str) -> bool:
    """Whether ``no_proxy`` names a host, its domain, its port too, or a network that it is in, such as 10.0.0.0/8."""
    if proxy_bypass(place) or proxy_bypass(host):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for item in no_proxy.split(","):
        try:
            if "/" in item and address in ipaddress.ip_network(item.strip(), strict=False):
                return True
        except ValueError:
            continue
    return False

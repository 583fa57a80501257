"""Who may use which route: keys, and what web pages of other sites may make a browser do.

A route's own declaration says who may use it, and the route that Starlette finds for a request decides, so that no
other spelling of a path leads past a key. A route that says nothing is for administrators.

A request that no key protects may come from any web page that somebody on this network has opened: such a page can make
its browser send requests here, and with a host name that it redirects to this address (DNS rebinding) read the answers.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from fenceline.frontend.request_types import RequestError

Headers = Mapping[bytes, bytes]
Handler = TypeVar("Handler", bound=Callable[..., Any])

_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Nobody can register such names in the public DNS, so no web site has one: names without a dot (of a machine on this
# network, a container, a service of compose or Kubernetes), and top-level domains that are reserved for private use.
_PRIVATE_NAME = re.compile(r"[a-z0-9_-]+|[a-z0-9_.-]+\.(localhost|local|internal)")


class Access(Enum):
    """Who may use a route: anybody, whoever has the API key, or whoever has the administrators' key."""

    ANYBODY = "anybody"
    CLIENTS = "clients"
    ADMINISTRATORS = "administrators"


def for_anybody(handler: Handler) -> Handler:
    """Mark ``handler``: its routes need no key."""
    return _marked(handler, Access.ANYBODY)


def for_clients(handler: Handler) -> Handler:
    """Mark ``handler``: its routes need the API key, if there is one. Without a mark they need the administrators'."""
    return _marked(handler, Access.CLIENTS)


def _marked(handler: Handler, access: Access) -> Handler:
    handler.access = access  # type: ignore[attr-defined]
    return handler


class Rule(NamedTuple):
    """``changes``: the route takes more than GET, so it changes something, also where it takes GET too."""

    access: Access
    changes: bool


_UNKNOWN = Rule(Access.CLIENTS, False)  # no such endpoint, which those with a key are told


def rule_of(route: Route) -> Rule:
    """What the declaration of ``route`` says."""
    access = getattr(route.endpoint, "access", Access.ADMINISTRATORS)
    return Rule(access, not (route.methods or set()) <= _SAFE_METHODS)


class Hosts:
    """The names by which clients may address this server: IP addresses, private names, ``own`` ones, and ``allowed``
    (--allowed-hosts), in which ``*`` means all and ``*.example.org`` all names below."""

    def __init__(self, own: Sequence[str] = (), allowed: Sequence[str] = ()) -> None:
        names = {name.lower().rstrip(".") for name in (*own, *allowed)}
        self._any = "*" in names
        self._names = names
        self._endings = tuple(name[1:] for name in names if name.startswith("*."))

    def has(self, host: bytes) -> bool:
        """Whether the header ``Host`` names this server."""
        if self._any:
            return True
        text = host.decode("latin-1").lower()
        name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0].rstrip(".")
        if name in self._names or name.endswith(self._endings) or _PRIVATE_NAME.fullmatch(name):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class AccessRules:
    """Which requests the application gets. ``origins``: those of --cors-allowed-origins."""

    def __init__(
        self,
        routes: Sequence[BaseRoute] = (),
        api_key: str | None = None,
        admin_api_key: str | None = None,
        hosts: Hosts | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        self._key = None if api_key is None else api_key.encode()
        self._admin_key = self._key if admin_api_key is None else admin_api_key.encode()
        self._hosts = hosts or Hosts()
        self._origins = frozenset(origin.encode() for origin in origins)
        self._routes = [route for route in routes if isinstance(route, Route)]
        assert len(self._routes) == len(routes), "routes that are nested have no rule"
        self._known = {
            (method, route.path): self._match({"type": "http", "method": method, "path": route.path})
            for route in self._routes
            if not route.param_convertors
            for method in route.methods or ()
        }

    def refusal(self, scope: Scope, headers: Headers) -> RequestError | None:
        """Why the application does not get the request, if it does not."""
        path, method = scope["path"], scope["method"]
        rule = self._known.get((method, path))
        if rule is None:  # no declared path as it stands: the path of a model, or something else
            if _CONTROL.search(path):
                return RequestError(400, "the path has control characters")
            rule = self._match(scope)
        if rule.access is Access.ANYBODY or method == "OPTIONS":
            return None
        is_admin = rule.access is Access.ADMINISTRATORS
        key = self._admin_key if is_admin else self._key
        if key is None:
            return self._page_refusal(rule, method, headers)
        if hmac.compare_digest(_given_key(headers), key):
            return None
        which = "admin API key" if is_admin and key is not self._key else "API key"
        return RequestError(401, f"send the server's {which} as 'Authorization: Bearer KEY'", code="invalid_api_key")

    def _match(self, scope: Scope) -> Rule:
        """The rule of the route that answers, found as Starlette's router does. If the method is another one, the
        answer is the first route's 405."""
        partial: Route | None = None
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return rule_of(route)
            if match is Match.PARTIAL and partial is None:
                partial = route
        return _UNKNOWN if partial is None else rule_of(partial)

    def _page_refusal(self, rule: Rule, method: str, headers: Headers) -> RequestError | None:
        """Why a request that no key protects is refused, if a web page may be behind it."""
        host = headers.get(b"host")
        if host is not None and not self._hosts.has(host):
            return RequestError(
                403,
                f"this server is not called {_shown(host)}: use its address, or start it with --allowed-hosts and this"
                " name, or with a key",
                code="host_not_allowed",
            )
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if method in _SAFE_METHODS:
            # A page needs no permission for a GET, and an older browser, or one far from here, names no origin for it.
            if rule.changes and (origin or site or headers.get(b"user-agent", b"").startswith(b"Mozilla/")):
                return RequestError(403, "a browser must use POST for this", code="origin_not_allowed")
            return None
        if origin is None and site is None:
            return None  # no browser
        if not self._is_own(origin, site, host):
            return RequestError(
                403,
                f"pages of {_shown(origin) if origin else 'other sites'} may not use this server: start it with"
                " --cors-allowed-origins and this origin, or with a key",
                code="origin_not_allowed",
            )
        if _has_body(headers) and not _is_json(headers.get(b"content-type", b"")):
            return RequestError(415, "send Content-Type: application/json", code="not_json")
        return None

    def _is_own(self, origin: bytes | None, site: bytes | None, host: bytes | None) -> bool:
        if site == b"same-origin" or (origin is None and site == b"none"):  # which no page can write itself
            return True
        if origin is None:
            return False
        return origin in self._origins or b"*" in self._origins or origin.partition(b"://")[2] == host


def _given_key(headers: Headers) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _has_body(headers: Headers) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1")[:100])


def own_names(host: str) -> tuple[str, ...]:
    """What this machine calls itself, and what --host calls it."""
    return host, socket.gethostname()

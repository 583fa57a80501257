"""The formats of JSON Schema that are enforced, as regular expressions of our own.

A text that one of them matches is valid for every reader that we know of: in Python's and JavaScript's libraries as in
the standard. So they leave out what the standards allow and readers refuse, such as leap seconds, the year 0, empty
labels, or fractions of more than six digits. The length of a whole host name, at most 253, is not counted: each
character would take a state of the grammar.
"""

from __future__ import annotations

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR_MINUTE})"

# Numbers of up to six digits: no reader's calendar is exceeded.
_N = "[0-9]{1,6}"
_TIME_PARTS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = f"P(?:{_DAYS}(?:{_TIME_PARTS})?|{_TIME_PARTS}|{_N}W)"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_H = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    (
        f"(?:{_H}:){{7}}{_H}",
        f"(?:{_H}:){{1,7}}:",
        *(f"(?:{_H}:){{1,{7 - after}}}(?::{_H}){{1,{after}}}" for after in range(1, 7)),
        f":(?::{_H}){{1,7}}",
        "::",
    )
)
_HEX = "[0-9A-Fa-f]"
# A label has at most 62 characters, and no two hyphens side by side, which mark other alphabets. The last one is no
# number, as that of an address is.
_LABEL = "[0-9A-Za-z]{1,20}(?:-[0-9A-Za-z]{1,20}){0,2}"
_LAST_LABEL = "[A-Za-z][0-9A-Za-z]{0,19}(?:-[0-9A-Za-z]{1,20}){0,2}"
_HOST = rf"(?:{_LABEL}\.)*{_LAST_LABEL}"
_ATOM = "[0-9A-Za-z_+-]{1,20}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@(?:[0-9A-Za-z]{{1,20}}(?:-[0-9A-Za-z]{{1,20}})?\.){{1,3}}[A-Za-z]{{2,24}}"

_PART = rf"(?:[0-9A-Za-z._~!$&'()*+,;=:@/-]|%{_HEX}{{2}})"
_REST = rf"(?:[0-9A-Za-z._~!$&'()*+,;=:@/?-]|%{_HEX}{{2}})"
_QUERY = rf"(?:\?{_REST}*)?(?:#{_REST}*)?"
# "file" has neither a user nor a port, so no other scheme begins like it.
_SCHEME = "(?:[A-EG-Za-eg-z]|[Ff][0-9A-HJ-Za-hj-z+.-])[0-9A-Za-z+.-]{0,15}"
_USER = "[0-9A-Za-z._~-]+(?::[0-9A-Za-z._~-]*)?@"
_PORT = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4})"
_ANY_LABEL = "[0-9A-Za-z]+(?:-[0-9A-Za-z]+)*"  # a URI's may have any length
_ANY_HOST = rf"(?:{_ANY_LABEL}\.)*[A-Za-z][0-9A-Za-z]*(?:-[0-9A-Za-z]+)*"
_URI = (
    rf"(?:{_SCHEME}://(?:{_USER})?(?:{_ANY_HOST}|{_IPV4})(?::{_PORT})?|file://)(?:/{_PART}*)?{_QUERY}"
    rf"|(?:mailto|tel|sms|urn|data|geo|news|magnet):[0-9A-Za-z._~+-]{_REST}*"
)
# For a limited length: with as few parts of any length as possible, because each of their characters is counted.
_SHORT_URI = (
    rf"{_SCHEME}://[0-9A-Za-z]{{1,20}}(?:[.-][0-9A-Za-z]{{1,20}}){{0,2}}\.[A-Za-z]{{2,8}}(?::{_PORT})?"
    r"(?:[/?][0-9A-Za-z._~!$&'()*+,;=:@/?-]*)?"
)
_SEGMENT = r"[0-9A-Za-z._~!$&'()*+,;=@-]+"
_URI_REFERENCE = rf"{_URI}|(?:/|/?{_SEGMENT}(?:/{_PART}*)?){_QUERY}"
_VARIABLE = r"[0-9A-Za-z_]+(?:\.[0-9A-Za-z_]+)*(?::[1-9][0-9]{0,3}|\*)?"
_URI_TEMPLATE = rf"(?:[0-9A-Za-z._~!$&()*+,;=:@/?#-]|%{_HEX}{{2}}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
_POINTER = r'(?:/(?:[^\x00-\x1f"/\\~\ud800-\udfff]|~[01])*)*'


def _uuid(version: str) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ABab]{_HEX}{{3}}-{_HEX}{{12}}"


PATTERNS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "time": _TIME,
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "iri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _URI_REFERENCE,
    "uri-template": _URI_TEMPLATE,
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    **{f"uuid{version}": _uuid(version) for version in "1345678"},
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]{{0,3}})(?:#|{_POINTER})",
    "base64": r"(?:[0-9A-Za-z+/]{4})*(?:[0-9A-Za-z+/]{2}==|[0-9A-Za-z+/]{3}=)?",
    "base64url": r"(?:[0-9A-Za-z_-]{4})*(?:[0-9A-Za-z_-]{2}==|[0-9A-Za-z_-]{3}=)?",
}
# In place of these where a length is limited.
LIMITED_PATTERNS = {"uri": _SHORT_URI, "iri": _SHORT_URI}

"""Word pools. Short everyday words, so that a small vocabulary holds most of them as one token."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _split(
    "Ada Alan Amy Anna Ben Bella Carl Clara Dan Dora Ed Ella Emma Eva Finn Fred Gina Greta Hans Hugo "
    "Ida Ivan Jack Jane Jim Joe Julia Karl Kate Leo Lena Lily Liam Luca Lucy Mark Mary Max Mia Mila "
    "Mira Nina Noah Nora Olga Oscar Otto Paul Pia Ray Rita Rosa Ruth Sam Sara Sofia Tara Theo Tim Tom "
    "Una Vera Will Zoe"
)

WORDS = _split(
    "apple arm axe ball band bank barn bat bean bear bed bell bench bike bird boat bone book boot bowl "
    "box brick bread bridge bus cake camp can candle cap car card cart cat chair cheese clock cloud coat "
    "coin corn cow cream crow cup deer desk dish dog door dress drum duck dust egg farm fan fence fig "
    "fire fish flag flute fog fork fox frog gate gift glass goat gold goose grape grass hand harp hat "
    "hen hill home hook horn horse house ice iron jam jar juice key king kite knife lake lamp leaf lemon "
    "lime lion lock log map mask melon milk mill mint moon moss mouse nail nest net nut oak oil olive "
    "onion oven owl pan park peach pear pen piano pie pig pin pine plum pond pony pot queen rain "
    "ring river road rock roof room rope rose sack salt sand seal seed sheep ship shoe silk silver sky "
    "snow soap sock spoon star stone sugar sun swan table tent tiger toad tower train tree wall wolf wood wool"
)

PLACES = _split("kitchen garden office school market library station harbor museum bakery theater forest")

THINGS = _split("apples books coins pens cups eggs stones shells nuts stamps cards balls")

COLORS = _split("red blue green black white yellow brown pink gray orange")

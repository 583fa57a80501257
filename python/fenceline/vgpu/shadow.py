"""Shadow."""


class Shadow:
    pass

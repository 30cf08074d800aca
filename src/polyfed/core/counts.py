"""Words that agree with a number, for messages."""


def counted(count: int, one: str, many: str) -> str:
    """Return a count with the word that fits it.

    Args:
        count: the count.
        one: the word for one thing, with a verb if the sentence has one.
        many: the word for any other count.

    >>> counted(1, "row has", "rows have"), counted(1200, "row", "rows")
    ('1 row has', '1,200 rows')
    """
    return f"{count:,} {one if count == 1 else many}"

"""The singular or plural of a word after a number, for texts such as error messages."""


def counted(count: int, one: str, many: str) -> str:
    """Return a count, followed by the word in the singular or plural.

    Args:
        count: the count.
        one: the word in the singular. If the sentence continues with a verb, include the verb, as in `row has`.
        many: the same in the plural, for any other count.

    >>> counted(1, "row has", "rows have"), counted(1200, "row", "rows")
    ('1 row has', '1,200 rows')
    """
    return f"{count:,} {one if count == 1 else many}"

"""Formats of dates: which day a text means.

A cell that is no day of the calendar never becomes a date.
"""

import datetime
import re

ISO_DATE = "%Y-%m-%d"
_ISO_DAY = re.compile(
    r"(\d{4}-\d\d-\d\d)([ T]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d([.,]\d+)?)?( ?(Z|UTC|[+-]\d\d(:?\d\d)?))?)?", re.ASCII
)
# Directives that C knows and Python does not.
_OF_C = {"%F": ISO_DATE, "%D": "%m/%d/%y", "%x": "%m/%d/%y", "%T": "%H:%M:%S", "%R": "%H:%M", "%e": "%d", "%h": "%b"}


def day_of(text: str, form: str) -> datetime.date | None:
    """Return the date ``text`` that is written as ``form``; None for another text, and for no day of the calendar."""
    try:
        if form == ISO_DATE:
            written = _ISO_DAY.fullmatch(text)
            return datetime.date.fromisoformat(written[1]) if written else None
        form = re.sub("|".join(_OF_C), lambda found: _OF_C[found[0]], form)
        moment = datetime.datetime.strptime(text, form)
    except ValueError:
        return None
    # Without a sign between them, 1122019 may be 1.12. or 11.2.: only all digits tell. Day 366 of another year than a
    # leap year would be a day of the next one.
    if re.search(r"%[a-zA-Z]%[a-zA-Z]|%[jUW]", form) and moment.strftime(form) != text:
        return None
    return moment.date()


def is_date_format(form: str, *, needs_month: bool) -> bool:
    """Return True if text that is written as ``form`` has a year, and with ``needs_month`` a month."""
    moment = datetime.datetime(2001, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    plain = re.sub("|".join(_OF_C), lambda found: _OF_C[found[0]], form)
    # Not read below: later versions of Python refuse a day of the month without a year.
    if not re.search("%[YyGc]", plain):
        return False
    try:
        day = day_of(moment.strftime(plain), form)
    except ValueError:
        return False
    return day is not None and day.year == moment.year and (not needs_month or day.month == moment.month)


def is_short(form: str) -> bool:
    """Return True if ``form`` writes a year in two digits."""
    return re.search(r"%[yDx]", form) is not None

"""What strict JSON has no word for becomes null, however deep it lies."""

import json
import math

import numpy as np

from fairpate.types import strict


def test_numbers_that_json_lacks_become_null_and_everything_else_stays() -> None:
    values = {
        "undefined": math.nan,
        "infinite": [math.inf, -math.inf, np.float64("inf")],
        "nested": ({"deep": (1.5, math.nan)}, []),
        "others": ["nan", True, 0, -0.0, 2**70, None, 1e308],
    }
    expected = {
        "undefined": None,
        "infinite": [None, None, None],
        "nested": [{"deep": [1.5, None]}, []],
        "others": ["nan", True, 0, -0.0, 2**70, None, 1e308],
    }
    found = strict(values)
    assert found == expected
    assert json.loads(json.dumps(found, allow_nan=False)) == expected
    assert math.isnan(values["undefined"]), "the values given stay as they are"
    assert strict(math.inf) is strict(None) is None

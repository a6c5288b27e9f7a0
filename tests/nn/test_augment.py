"""Augmentation against exact image operations, and its draws."""

import pytest
import torch

from fairpate.config import AugmentConfig
from fairpate.nn.fit import apply_changes, augment, draw_changes, strengthened

EVERYTHING = AugmentConfig(
    rotation_degrees=20,
    translation_fraction=0.1,
    scale_fraction=0.2,
    shear_degrees=10,
    elastic_fraction=0.05,
    channel_swap=0.5,
    horizontal_flip=0.5,
)


def _images(count: int = 6, channels: int = 3, height: int = 8, width: int = 8) -> torch.Tensor:
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(1)) + 0.5


def _draws(count: int, channels: int = 3, **values: float) -> torch.Tensor:
    """Neutral draws (0.5 is no rotation, shift, zoom or shear) with some of them replaced."""
    columns = {"rotation": 0, "shift_x": 1, "shift_y": 2, "zoom": 3, "shear": 4, "flip": 5, "swap": 6}
    changes = draw_changes(count, num_channels=channels, generator=torch.Generator().manual_seed(2))
    changes[:, :5] = 0.5
    for name, value in values.items():
        changes[:, columns[name]] = value
    return changes


def test_the_extreme_rotation_is_a_quarter_turn() -> None:
    x = _images()
    turned = apply_changes(x, AugmentConfig(rotation_degrees=90), _draws(6, rotation=1.0))
    back = apply_changes(x, AugmentConfig(rotation_degrees=90), _draws(6, rotation=0.0))
    expected = {k: torch.rot90(x, k, dims=(2, 3)) for k in (1, -1)}
    sense = 1 if torch.allclose(turned, expected[1], atol=1e-4) else -1
    torch.testing.assert_close(turned, expected[sense], atol=1e-4, rtol=0)
    torch.testing.assert_close(back, expected[-sense], atol=1e-4, rtol=0)


def test_an_elastic_change_of_equal_shifts_is_a_shift() -> None:
    x, changes = _images(), _draws(6)
    changes[:, 15:] = 0.5
    still = apply_changes(x, AugmentConfig(elastic_fraction=0.25), changes)
    torch.testing.assert_close(still, x, atol=1e-5, rtol=0)
    changes[:, 15:40] = 1.0  # every horizontal shift at its largest: a quarter of the width, two pixels
    moved = apply_changes(x, AugmentConfig(elastic_fraction=0.25), changes)
    torch.testing.assert_close(moved[..., :-2], x[..., 2:], atol=1e-4, rtol=0)
    torch.testing.assert_close(moved[..., -2:], torch.zeros(6, 3, 8, 2), atol=1e-4, rtol=0)


def test_an_elastic_change_bends_and_bounds_its_shifts() -> None:
    ramp = torch.arange(32.0).expand(4, 1, 32, 32).contiguous()  # a pixel's value is its column
    bent = apply_changes(ramp, AugmentConfig(elastic_fraction=0.05), _draws(4, channels=1))
    inside = (bent - ramp)[..., 4:-4, 4:-4]
    assert inside.std() > 0.1
    assert inside.abs().max() < 1.5 * 0.05 * 32  # bicubic interpolation overshoots a little


def test_half_a_turn_keeps_the_shape_of_an_oblong_image() -> None:
    x = _images(height=6, width=10)
    turned = apply_changes(x, AugmentConfig(rotation_degrees=180), _draws(6, rotation=1.0))
    torch.testing.assert_close(turned, x.flip(2, 3), atol=1e-4, rtol=0)


def test_a_quarter_turn_of_an_oblong_image_keeps_distances() -> None:
    x = torch.zeros(1, 1, 9, 15)
    x[0, 0, 4, 7 + 3] = 1.0
    turned = apply_changes(x, AugmentConfig(rotation_degrees=90), _draws(1, channels=1, rotation=1.0))
    row, column = divmod(int(turned.argmax()), 15)
    assert (abs(row - 4), column) == (3, 7)


def test_a_shift_moves_pixels_and_brings_in_zeros() -> None:
    x = _images()
    moved = apply_changes(x, AugmentConfig(translation_fraction=0.25), _draws(6, shift_x=1.0))
    expected = torch.zeros_like(x)
    expected[..., 2:] = x[..., :-2]
    torch.testing.assert_close(moved, expected, atol=1e-4, rtol=0)


def test_zoom_two_shows_the_middle_half() -> None:
    x = torch.zeros(1, 1, 8, 8)
    x[..., 2:6, 2:6] = 1.0
    larger = apply_changes(x, AugmentConfig(scale_fraction=0.999999), _draws(1, channels=1, zoom=1.0))
    assert float(larger[..., 1:7, 1:7].min()) > 0.999
    assert float(larger.mean()) > 0.75


def test_shear_moves_rows_sideways_by_their_height() -> None:
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, :, 4] = 1.0
    sheared = apply_changes(x, AugmentConfig(shear_degrees=45), _draws(1, channels=1, shear=1.0))
    columns = sheared[0, 0].argmax(dim=1)
    assert columns.diff().unique().tolist() in ([1], [-1])


@pytest.mark.parametrize("rotation", [0.0, 1e-4])
def test_a_flip_is_a_mirror_image_with_or_without_geometry(rotation: float) -> None:
    x = _images()
    config = AugmentConfig(horizontal_flip=1.0, rotation_degrees=rotation)
    torch.testing.assert_close(apply_changes(x, config, _draws(6)), x.flip(-1), atol=1e-4, rtol=0)


def test_a_channel_swap_is_a_uniform_permutation() -> None:
    x = torch.arange(3.0)[None, :, None, None].expand(6000, 3, 2, 2)
    swapped = augment(x, AugmentConfig(channel_swap=1.0), torch.Generator().manual_seed(0))
    orders, counts = swapped[:, :, 0, 0].unique(dim=0, return_counts=True)
    assert len(orders) == 6
    assert 900 < int(counts.min()) <= int(counts.max()) < 1100  # 1000 each, standard deviation 29
    unchanged = augment(x, AugmentConfig(channel_swap=0.5), torch.Generator().manual_seed(0))[:, :, 0, 0]
    share = float((unchanged == torch.arange(3.0)).all(dim=1).float().mean())
    assert 0.55 < share < 0.62  # 1/2 + 1/2 * 1/6


def test_erasing_blanks_one_rectangle() -> None:
    x = _images(count=200, height=20, width=30)
    blank = augment(x, AugmentConfig(), torch.Generator().manual_seed(3), erase=1.0)[:, 0] == 0
    heights, widths = blank.any(dim=2).sum(dim=1), blank.any(dim=1).sum(dim=1)
    assert torch.equal(blank.sum(dim=(1, 2)), heights * widths)
    assert int(heights.min()) >= 2
    assert int(heights.max()) <= 8
    assert int(widths.min()) >= 3
    assert int(widths.max()) <= 12


def test_an_image_is_changed_by_its_own_draws_only() -> None:
    x = _images()
    changes = draw_changes(6, num_channels=3, generator=torch.Generator().manual_seed(4))
    together = apply_changes(x, EVERYTHING, changes)
    alone = torch.cat([apply_changes(x[i : i + 1], EVERYTHING, changes[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(alone, together)
    assert not torch.allclose(together, x)


def test_draws_follow_the_generator_and_identity_draws_nothing() -> None:
    x = _images()
    first, second = (augment(x, EVERYTHING, torch.Generator().manual_seed(9)) for _ in range(2))
    assert torch.equal(first, second)
    generator = torch.Generator().manual_seed(9)
    assert augment(x, AugmentConfig(), generator) is x
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(9).get_state())


def test_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="reads images"):
        apply_changes(torch.zeros(3, 4), EVERYTHING, torch.zeros(3, 16))


def test_stronger_changes_are_twice_as_far_and_never_weaker() -> None:
    weak = AugmentConfig(rotation_degrees=10, translation_fraction=0.05, scale_fraction=0.1, horizontal_flip=0.5)
    assert strengthened(weak) == AugmentConfig(
        rotation_degrees=20,
        translation_fraction=0.1,
        scale_fraction=0.2,
        shear_degrees=15,
        elastic_fraction=0.03,
        horizontal_flip=0.5,
    )
    far = AugmentConfig(rotation_degrees=170, translation_fraction=0.8, shear_degrees=40)
    assert strengthened(far).model_dump() == far.model_dump() | {"rotation_degrees": 180.0, "elastic_fraction": 0.03}

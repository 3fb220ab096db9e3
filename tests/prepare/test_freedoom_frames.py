"""What becomes of the engine's buffers: depth, parts, reduction, filters and labels, on made-up buffers."""

from __future__ import annotations

import numpy as np
import pytest

from visgen.prepare import _freedoom_frames as frames
from visgen.prepare._freedoom_frames import CEILING, FLOOR, MONSTERS, PARTS, SCENERY, SKY, SUBJECTS, WALL, Frame, Object

SIZE = (64, 64)
ZOMBIE, WORM = Object(2, "Zombieman", "Monster"), Object(3, "Demon", "Monster")
rng = np.random.default_rng(0)


def buffers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A corridor [240, 320]: floor below, ceiling above, a bright wall of depth 40 between."""
    rgb = rng.integers(40, 220, (240, 320, 3), np.uint8)
    labels = np.ones((240, 320), np.uint8)
    labels[90:150] = 0
    depth = np.full((240, 320), 40, np.uint8)
    for rows in (slice(0, 90), slice(150, 240)):
        depth[rows] = np.linspace(8, 38, 90).astype(np.uint8)[:: -1 if rows.start else 1, None]
    return rgb, depth, labels


def frame(objects: tuple[Object, ...] = (), **changed: np.ndarray) -> Frame:
    rgb, depth, labels = buffers()
    made = {"rgb": rgb, "depth": depth, "labels": labels, **changed}
    return Frame(made["rgb"], made["depth"], made["labels"], objects, SIZE)


def with_object(value: int, rows: slice, columns: slice) -> np.ndarray:
    labels = buffers()[2]
    labels[rows, columns] = value
    return labels


# --------------------------------------------------------------------------------------------------- reduction


@pytest.mark.parametrize("size", [(64, 64), (60, 80), (32, 100), (7, 5)])
def test_averages_are_those_of_exact_areas(size: tuple[int, int]) -> None:
    values = rng.integers(0, 256, (24, 40, 3), np.uint8)
    fine = values.repeat(size[0], 0).repeat(size[1], 1).reshape(size[0], 24, size[1], 40, 3).astype(np.int64)
    mean = np.floor(fine.mean((1, 3)) + 0.5)
    assert np.abs(frames.averaged(values, size) - mean).max() == 0


def test_a_vote_is_won_by_the_larger_area_not_by_the_middle() -> None:
    parts = np.array([[4, 4, 1], [4, 4, 1], [1, 1, 1]], np.uint8)
    assert frames.voted(parts, (1, 1)) == [[1]]
    parts[2, 0] = 4
    assert frames.voted(parts, (1, 1)) == [[4]]
    assert frames.voted(np.array([[7, 2]], np.uint8), (1, 1)) == [[2]], "of equal ones the first"


@pytest.mark.parametrize(("size", "crop"), [((64, 64), (240, 240)), ((64, 96), (213, 320)), ((32, 100), (102, 320))])
def test_the_crop_is_central_and_of_the_aspect(size: tuple[int, int], crop: tuple[int, int]) -> None:
    rows, columns = frames.centre((240, 320), size)
    assert (rows.stop - rows.start, columns.stop - columns.start) == crop
    assert abs(rows.start - (240 - rows.stop)) <= 1 and abs(columns.start - (320 - columns.stop)) <= 1


def test_depth_becomes_brightness_and_back() -> None:
    levels = np.arange(128)
    shown = frames.near(levels)
    assert shown[0] == 255 and shown[127] == 0 and np.all(np.diff(shown) < 0)
    assert np.abs(frames.level_of(shown) - levels).max() < 0.01
    assert frame().depth.dtype == np.uint8 and np.array_equal(
        frame(depth=np.full((240, 320), 10, np.uint8)).depth, np.full(SIZE, round(float(frames.near(np.array(10)))))
    )


def test_percentiles_count_pixels() -> None:
    levels = np.array([[1, 2, 3, 4, 5, 6, 7, 8, 9, 100]], np.uint8)
    assert [frames.percentile(levels, p) for p in (0.1, 0.5, 0.9, 1.0)] == [1, 5, 9, 100]


# ----------------------------------------------------------------------------------------------- depth and parts


def test_floor_lies_below_the_horizon_ceiling_above() -> None:
    parts = frame().parts
    assert set(np.unique(parts[:90])) == {CEILING} and set(np.unique(parts[150:])) == {FLOOR}
    assert set(np.unique(parts[90:150])) == {WALL}


def test_saturated_wall_is_sky_above_and_a_riser_below() -> None:
    _, depth, labels = buffers()
    depth[90:100] = 127
    labels[190:200] = 0
    depth[190:200] = 140
    made = frame(depth=depth, labels=labels)
    assert set(np.unique(made.parts[90:100])) == {SKY} and set(np.unique(made.parts[190:200])) == {WALL}
    assert np.all(made.levels[190:200] == depth[200, 0]), "a riser has the depth of the floor at its foot"
    assert np.all(made.levels[90:100] == 127)


def test_wrapped_depth_of_a_near_floor_becomes_0() -> None:
    _, depth, labels = buffers()
    depth[230:, :160] = 193
    depth[100:140] = 200  # far, near the horizon
    labels[100:140] = 1
    made = frame(depth=depth, labels=labels)
    assert np.all(made.levels[230:, :100] == 0) and np.all(made.levels[100:140] == 127)
    assert made.wrapped == pytest.approx(10 * 120 / 240**2)


def test_objects_have_the_part_of_their_category() -> None:
    labels = buffers()[2]
    known = [Object(i + 2, "x", name) for i, name in enumerate(("Monster", "Health", "SFX", "Self", "Gore", "new"))]
    for i in range(6):
        labels[:, 60 + 10 * i : 70 + 10 * i] = i + 2
    parts = frame(tuple(known), labels=labels).parts
    names = [PARTS[parts[0, 25 + 10 * i]] for i in range(6)]
    assert names == ["monster", "item", "effect", "weapon", "decor", "decor"]


# ------------------------------------------------------------------------------------------------ filters, labels


def test_a_good_view_has_no_fault() -> None:
    assert frame().fault() is None


def test_each_filter_refuses_its_defect() -> None:
    rgb, depth, labels = buffers()
    fence, strip, wrap = depth.copy(), depth.copy(), depth.copy()
    fence[95:145, 100:101] = 0
    strip[90:150, 200:210] = 1
    strip[90:150, :200] = 8  # no jump of 11 levels
    strip[90:150, 210:] = 8
    wrap[200:202] = 195
    faults = {
        "close": frame(depth=np.full_like(depth, 4)).fault(),
        "torn": frame(depth=fence).fault(),
        "strip": frame(depth=strip).fault(),
        "wrapped": frame(depth=wrap).fault(),
        "dark": frame(rgb=rgb // 30).fault(),
        "even": frame(rgb=np.full_like(rgb, 128)).fault(),
        "plain": frame(labels=np.zeros_like(labels)).fault(),
    }
    expected = {"strip": "torn", "even": "dark"}
    assert faults == {name: expected.get(name, name) for name in faults}
    assert set(faults.values()) <= set(frames.FILTERS)


def test_the_weapon_of_a_clip_tears_nothing() -> None:
    _, depth, labels = buffers()
    depth[100:240, 150:170], labels[100:240, 150:170] = 0, 5
    gun = Object(5, "DoomPlayer", "Self")
    assert frame((gun,), depth=depth, labels=labels).fault() is None
    assert frame((Object(5, "Fence", "Obstacle"),), depth=depth, labels=labels).fault() == "torn"


def subject(*shares: tuple[Object, float]) -> str | None:
    labels, column = buffers()[2], 40
    for each, share in shares:
        width = round(240 * share * 4)
        labels[100:160, column : column + width] = each.value
        column += width
    number = frame(tuple(each for each, _ in shares), labels=labels).subject()
    return None if number is None else SUBJECTS[number]


def test_the_subject_is_the_largest_monster_if_it_is_clear() -> None:
    assert subject((ZOMBIE, 0.05)) == "zombie"
    assert subject((ZOMBIE, 0.05), (WORM, 0.2)) == "flesh worm"
    assert subject((ZOMBIE, 0.05), (WORM, 0.07)) is None, "two of a size"
    assert subject((ZOMBIE, 0.02)) is None, "too small to be the subject, too large to be none"
    assert subject((ZOMBIE, 0.004)) in SCENERY
    twins = (ZOMBIE, Object(9, "Zombieman", "Monster"))
    assert subject((twins[0], 0.02), (twins[1], 0.02)) == "zombie", "areas of one species add up"


def test_without_monsters_it_is_the_kind_of_scenery() -> None:
    depth = buffers()[1]
    assert SUBJECTS[frame().subject() or 0] == "room"
    far, open_ = depth.copy(), depth.copy()
    far[90:150] = 100
    open_[90:115] = 127
    assert SUBJECTS[frame(depth=far).subject() or 0] == "hall"
    assert SUBJECTS[frame(depth=open_).subject() or 0] == "outdoors"
    assert len(SUBJECTS) == len(MONSTERS) + 3 == 18

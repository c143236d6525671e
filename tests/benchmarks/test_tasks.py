"""docs/tasks.md and docs/serve.png are of today."""

import re

import pytest
from PIL import Image

from benchmarks import page_picture, tasks


def test_the_page_has_each_task_with_its_command_and_flags():
    text = tasks.PAGE.read_text()
    times = [float(s) for s in re.findall(r"^- (\d+) s on an RTX 4090$", text, re.M)]
    names = [task.name for task in tasks.TASKS]
    assert len(times) == 10 and text == tasks.page(dict(zip(names, times, strict=True)))
    assert all(len(task.flags) == 3 for task in tasks.TASKS)


@pytest.mark.parametrize("task", tasks.TASKS, ids=lambda task: task.name)
def test_a_strip_is_of_the_words_of_today(task):
    with Image.open(tasks.STRIPS / f"{task.name}.png") as strip:
        assert strip.info["Command"] == tasks.made_by(task)


def test_the_picture_of_the_page_is_of_today():
    with Image.open(page_picture.PICTURE) as picture:
        assert picture.info["Page"] == page_picture.digest()


@pytest.mark.slow
def test_seconds_are_those_of_the_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tasks.inputs(1536, 1024, tasks.CLIP_FRAMES)
    times = {task.name: tasks.seconds(task) for task in tasks.TASKS}
    assert tasks.PAGE.read_text() == tasks.page(times)

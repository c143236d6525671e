"""A model for the pipelines that start from a clip or go on with one."""

import pytest

import ltx2rt


@pytest.fixture(scope="module")
def generation(request):
    return getattr(request, "param", "2.3")


@pytest.fixture(scope="module")
def opened(tiny, generation):
    how = {"device": "cpu", "distilled_lora": "none", "dtype": "float32"}
    with ltx2rt.open(tiny(f"tiny-{generation}", "official"), backend="cuda", **how) as session:
        yield session

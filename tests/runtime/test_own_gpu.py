"""What a process settles about its GPU before it loads, with functions of torch and Triton that only note."""

from __future__ import annotations

from unittest.mock import PropertyMock, create_autospec

import pytest
import torch

from moewe.native.gpu.driver import start_driver
from moewe.runtime.ranks.own_gpu import runs_kernels, take_gpu


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> PropertyMock:
    """What stands in for Triton's driver, which is made when it is first looked at."""
    from triton.runtime.driver import DriverConfig

    made = PropertyMock()
    monkeypatch.setattr(DriverConfig, "active", made)
    return made


def test_the_gpu_is_that_of_the_rank_and_fp32_means_fp32(driver: PropertyMock, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = create_autospec(torch.cuda.set_device)
    monkeypatch.setattr(torch.cuda, "set_device", taken)
    capability = create_autospec(torch.cuda.get_device_capability, return_value=(7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    runs_kernels.cache_clear()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as an environment with TF32 leaves it
    try:
        take_gpu(2)
        assert not driver.called, "no kernel of Triton runs on this one"
        capability.return_value = (9, 0)
        take_gpu(3)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
        runs_kernels.cache_clear()
    assert [call.args for call in taken.call_args_list] == [(2,), (3,)]
    assert driver.called, "the driver is made here, not after the weights were loaded"


@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler.\nSee CC"), AssertionError()])
def test_one_line_says_what_triton_lacks(error: Exception, driver: PropertyMock) -> None:
    driver.side_effect = error
    said = str(error).splitlines()[0] if str(error) else "AssertionError"
    with pytest.raises(ValueError, match=f"on this GPU: {said}; it needs a C compiler") as raised:
        start_driver()
    assert "\n" not in str(raised.value)

"""GPUs, cores and variables of each rank."""

import os
import subprocess

import pytest

from jaxche.cluster import count_gpus
from jaxche.cluster._gpus import default_platform, gpu_ids, nvidia_smi, parse_listing, visible_gpus
from jaxche.cluster._placement import Placement, assign_placements, pinned, rank_environment

LISTING = """\
GPU 0: NVIDIA A100 80GB PCIe (UUID: GPU-a)
  MIG 3g.40gb     Device  0: (UUID: MIG-1)
  MIG 2g.20gb     Device  1: (UUID: MIG-2)
GPU 1: NVIDIA L4 (UUID: GPU-b)
"""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_gpus_from_variable_or_nvidia_smi(monkeypatch):
    assert gpu_ids({"CUDA_VISIBLE_DEVICES": "2, GPU-x,-1,3"}) == ["2", "GPU-x"]
    assert gpu_ids(NO_GPU) == []
    a100 = "NVIDIA A100 80GB PCIe"
    parts = [("MIG-1", f"{a100} MIG 3g.40gb"), ("MIG-2", f"{a100} MIG 2g.20gb"), ("GPU-b", "NVIDIA L4")]
    assert parse_listing(LISTING) == parts
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert count_gpus() == 3
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    assert count_gpus() == 0


def test_a_driver_that_hangs_shows_no_gpus(monkeypatch):
    def hangs(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert nvidia_smi("-L") == (124, "no answer in 30 s")
    assert gpu_ids({}) == []


def test_the_other_gpus_are_listed_where_one_has_a_fault(monkeypatch):
    monkeypatch.setattr("jaxche.cluster._gpus.nvidia_smi", lambda *_: (14, LISTING))
    assert gpu_ids({}) == ["MIG-1", "MIG-2", "GPU-b"]


def test_a_container_without_nvidia_smi_has_gpus_too(monkeypatch, tmp_path):
    for address, kind in (("0000:3b:00.0", "NVIDIA L4"), ("0000:01:00.0", "NVIDIA H100")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(f"Model: \t\t {kind}\nGPU UUID: \t GPU-????\n")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("jaxche.cluster._gpus._DRIVER", tmp_path)
    assert gpu_ids({}) == ["0", "1"]
    # An unknown UUID is none: two processes would seem to share a GPU.
    assert visible_gpus({}) == [("", "NVIDIA H100"), ("", "NVIDIA L4")]
    assert gpu_ids(NO_GPU) == []


def test_visible_gpus(monkeypatch):
    plain = "GPU 0: NVIDIA H100 (UUID: GPU-aa)\nGPU 1: NVIDIA L4 (UUID: GPU-bb)\n"
    monkeypatch.setattr("jaxche.cluster._gpus.nvidia_smi", lambda *_: (0, plain))
    h100, l4 = ("GPU-aa", "NVIDIA H100"), ("GPU-bb", "NVIDIA L4")
    assert visible_gpus({}) == [h100, l4]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == [l4]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-aa"}) == [l4, h100]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "5"}) == [("", "GPU")]
    assert visible_gpus(NO_GPU) == []


@pytest.mark.parametrize(
    ("platforms", "first"),
    [("", "cuda"), ("gpu", "cuda"), ("cuda,cpu", "cuda"), ("cpu,cuda", "cpu"), (" TPU,cpu", "tpu"), (None, "cuda")],
)
def test_default_platform(platforms, first):
    assert default_platform({} if platforms is None else {"JAX_PLATFORMS": platforms}) == first


def test_each_rank_gets_a_gpu_and_too_few_are_refused():
    assert [place.gpu for place in assign_placements(2, {"CUDA_VISIBLE_DEVICES": "3,1,0"})] == ["3", "1"]
    for way in (r"-n 1, or JAX_PLATFORMS=cpu jaxche launch -n 3", "--on-cpu 2", "CUDA_VISIBLE_DEVICES=0,0,0"):
        with pytest.raises(ValueError, match=f"processes=3.*1 GPU.*{way}"):
            assign_placements(3, {"CUDA_VISIBLE_DEVICES": "0"})
    assert [place.gpu for place in assign_placements(2, {"CUDA_VISIBLE_DEVICES": "0,0"})] == ["0", "0"]
    with pytest.raises(ValueError, match=r"0 GPU\(s\)"):
        assign_placements(1, NO_GPU | {"JAX_PLATFORMS": "cuda"})


@pytest.mark.parametrize(
    "environ",
    [
        NO_GPU,
        NO_GPU | {"JAX_PLATFORMS": "cpu,cuda"},
        {"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"},
        # JAX trains on its first platform.
        {"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu,cuda"},
    ],
)
def test_cores_are_reused(environ, monkeypatch):
    monkeypatch.setattr("jaxche.cluster._placement._cores", lambda: [4, 7])
    assert [place.core for place in assign_placements(3, environ)] == [4, 7, 4]


@pytest.mark.parametrize(
    ("environ", "on_cpu", "write"),
    [
        (NO_GPU, 0, "0 GPU.* 2 CPU core.*-n 2 .processes=2.$"),
        ({"JAX_PLATFORMS": "tpu"}, 0, "-n 2 .processes=2.$"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 0, "1 GPU.*-n 1 .processes=1.$"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 99_998, "-n 1 .processes=1.$"),
    ],
)
def test_far_more_processes_than_cores_are_refused(environ, on_cpu, write, monkeypatch):
    monkeypatch.setattr("jaxche.cluster._placement._cores", lambda: [4, 7])
    with pytest.raises(ValueError, match=f"processes=99999, .*{write}"):
        assign_placements(99_999, environ, on_cpu)


def test_some_processes_more_than_cores_are_no_mistake(monkeypatch):
    monkeypatch.setattr("jaxche.cluster._placement._cores", lambda: [4, 7])
    assert len(assign_placements(32, NO_GPU)) == 32
    assert len(assign_placements(33, {"CUDA_VISIBLE_DEVICES": "0"}, on_cpu=32)) == 33
    # As many processes on a GPU as the user lists.
    assert len(assign_placements(50, {"CUDA_VISIBLE_DEVICES": ",".join("0" * 50)})) == 50


@pytest.mark.parametrize(
    ("environ", "first"), [({"CUDA_VISIBLE_DEVICES": "0"}, "GPU 0"), ({"JAX_PLATFORMS": "tpu"}, "tpu")]
)
def test_some_ranks_train_on_the_cpu_beside_the_others(environ, first):
    one, other = assign_placements(2, environ, on_cpu=1)
    assert (str(one), str(other)) == (first, "CPU")
    made = rank_environment(environ, 1, 2, "h:1", other)
    assert made["JAX_PLATFORMS"] == "cpu"
    assert not {"XLA_FLAGS", "OMP_NUM_THREADS"} & set(made)  # it takes all cores


def test_other_devices_are_left_to_jax():
    place = assign_placements(1, {"JAX_PLATFORMS": "tpu"})[0]
    assert place == Placement(platform="tpu")
    assert "XLA_FLAGS" not in rank_environment({"JAX_PLATFORMS": "tpu"}, 0, 1, "h:1", place)


def test_the_variables_of_a_cpu_rank():
    base = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true", "OMP_NUM_THREADS": "3", "KEPT": "1"}
    made = rank_environment(base, 1, 2, "127.0.0.1:5", Placement(core=0, platform="cpu", pace_ms=12.5))
    assert made["JAXCHE_COORDINATOR"] == "127.0.0.1:5"
    assert (made["JAXCHE_NUM_PROCESSES"], made["JAXCHE_PROCESS_ID"]) == ("2", "1")
    assert made["JAXCHE_PACE_MS"] == "12.5"
    assert made["JAX_PLATFORMS"] == "cpu"
    assert made["PYTHONUNBUFFERED"] == made["OPENBLAS_NUM_THREADS"] == "1"
    # What the user chose stays.
    assert made["XLA_FLAGS"] == base["XLA_FLAGS"]
    assert (made["OMP_NUM_THREADS"], made["KEPT"]) == ("3", "1")


def test_the_variables_of_a_gpu_rank():
    made = rank_environment({}, 0, 1, "127.0.0.1:5", Placement(gpu="GPU-a", platform="cuda"))
    assert made["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert not {"JAXCHE_PACE_MS", "XLA_FLAGS", "OMP_NUM_THREADS", "JAX_PLATFORMS"} & set(made)


@pytest.mark.parametrize("base", [{}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=0"}])
def test_the_c_library_keeps_memory_unless_the_user_chose_otherwise(base):
    made = rank_environment(base, 0, 1, "h:1", Placement(core=0, platform="cpu"))["GLIBC_TUNABLES"]
    found = dict(word.split("=") for word in made.split(":"))
    assert len(found) == made.count(":") + 1
    assert found["glibc.malloc.hugetlb"] == ("0" if base else "1")
    assert found["glibc.malloc.arena_max"] == ("2" if base else "1")
    assert {"glibc.malloc.mmap_max", "glibc.malloc.trim_threshold", "glibc.malloc.top_pad"} < found.keys()
    assert made.startswith(base.get("GLIBC_TUNABLES", ""))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin")
def test_pinning_is_undone():
    before = os.sched_getaffinity(0)
    core = max(before)

    def fail():
        with pinned(core):
            assert os.sched_getaffinity(0) == {core}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.sched_getaffinity(0) == before

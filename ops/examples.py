"""The examples at the end of each verb's `--help`. A test parses each with the verb's own parser."""

from __future__ import annotations

#: The command lines that a user can type, each with what it does, by the words after `archipelago`.
EXAMPLES: dict[str, dict[str, str]] = {
    "up": {
        "archipelago up": "Train the smallest model on this machine, with three islands.",
        "archipelago up --run mine --islands 2 --data.corpus mine --inner.steps 3000": "Train on your own text.",
        "archipelago up --task docs/examples/task_bytes.py --run bytes": "Train a model of your own, from a file.",
        "archipelago up --run mine --resume": "Continue from the newest checkpoint after the Redis was lost.",
        "archipelago up --run shared --open": "Let other machines join, over TLS and with invitations.",
    },
    "init": {
        "archipelago init redis://:PASSWORD@HOST:6379 --run demo --model.size small": "Create a run in a Redis.",
        "archipelago init --run bytes --task docs/examples/task_bytes.py": "Create a run that trains a task of yours.",
        "archipelago init --run tuned --from demo-llama --data.corpus mine": "Begin with the weights of an export.",
    },
    "island": {
        "archipelago island redis://:PASSWORD@HOST:6379 --run demo": "Join the run demo.",
        "archipelago island demo.oslo.join": "Join with a join file that `archipelago invite` made.",
        "archipelago island --run bytes --task docs/examples/task_bytes.py": "Train the task of the run.",
        "archipelago island --run demo --mesh data=2,fsdp=2": "Use four devices of this machine.",
        "archipelago island --run demo --coordinator node0:9000 --hosts 2 --host-rank 1": "Be the second host of one.",
        "archipelago island --run demo --name oslo --corpus private": "Train on a text that stays on this machine.",
    },
    "merger": {
        "archipelago merger redis://:PASSWORD@HOST:6379 --run demo": "Serve the run demo. The second one stands by.",
        "archipelago merger --run demo --resume": "Restore the run from its checkpoints if the Redis has lost it.",
        "archipelago merger --run demo --bucket s3://my-bucket/runs": "Copy the checkpoints to a bucket.",
    },
    "status": {
        "archipelago status --run demo": "Show the run once. The exit status is 1 if somebody should look at it.",
        "archipelago status --run demo --watch": "Show it live.",
        "archipelago status --legend": "Explain the columns.",
    },
    "runs": {
        "archipelago runs": "List the runs at $ARCHIPELAGO_URL and those in the folder runs/.",
        "archipelago runs redis://:PASSWORD@HOST:6379 --json": "List the runs of a Redis for a program.",
    },
    "rm": {
        "archipelago rm old redis://:PASSWORD@HOST:6379": "Delete the keys of the run old, after you typed its name.",
        "archipelago rm old redis://HOST:6379 --yes": "Delete it without a question, for scripts.",
    },
    "dash": {
        "archipelago dash --run demo --open": "Open the page of the run in the browser.",
        "archipelago dash --host 0.0.0.0 --port 8080": "Serve the page to other machines.",
    },
    "steer": {
        "archipelago steer --run demo": "Show what is set.",
        "archipelago steer outer.learning_rate=0.5 sync.quorum=2": "Change two settings from the next round on.",
        "archipelago steer merging=paused": "Pause merging; `merging=` resumes it.",
        "archipelago steer island.oslo=drain": "Ask an island to send its work and leave.",
    },
    "invite": {
        "archipelago invite oslo --run demo": "Make a user and a join file for the island oslo.",
        "archipelago invite eyes --role viewer --expires 7d": "Let somebody look for a week.",
        "archipelago invite": "List the members.",
    },
    "revoke": {"archipelago revoke oslo --run demo": "End the membership of the island oslo at once."},
    "doctor": {
        "archipelago doctor redis://:PASSWORD@HOST:6379 --run demo": "Check this site before it joins.",
        "archipelago doctor": "Check only this machine.",
    },
    "report": {
        "archipelago report demo": "Write the report of the run in runs/demo.",
        "archipelago report redis://:PASSWORD@HOST:6379 --run demo --out demo.html": "Write that of a run at a Redis.",
    },
    "export": {
        "archipelago export runs/demo --out demo-llama": "Write the newest checkpoint as a Llama.",
        "archipelago export redis://HOST:6379 --run demo --out demo-llama": "Write the newest parameters of a run.",
    },
    "generate": {
        "archipelago generate demo-llama --prompt 'def main(' --tokens 200": "Continue a prompt with an export.",
        "archipelago generate redis://HOST:6379 --run demo": "Sample from a run that trains now.",
    },
    "prepare": {
        "archipelago prepare notes/ --name mine": "Make a corpus of the text files in a folder.",
        "archipelago prepare enwik8": "Download and prepare 100 MB of Wikipedia.",
        "archipelago prepare notes/ --name mine-bpe --tokenizer bpe:16384": "Learn a tokenizer on it.",
    },
    "replay": {
        "archipelago replay demo": "Merge the recorded run again, and compare every digest.",
    },
    "chaos": {
        "archipelago chaos --seconds 120 --islands 4": "Train for two minutes while processes are killed.",
        "archipelago chaos --task docs/examples/task_bytes.py": "Kill processes that train a task of yours.",
        "archipelago chaos --every 15 --baseline": "Compare with data-parallel training under the same kills.",
    },
    "bench parity": {
        "archipelago bench parity --quick": "Compare with data-parallel training, in minutes.",
        "archipelago bench parity --task docs/examples/task_bytes.py --islands 1 2 4 --intervals 12 48": (
            "Show what M and H cost a task of yours."
        ),
    },
    "bench study": {"archipelago bench study isotropic --show": "Show the table of a study."},
    "bench mixed": {"archipelago bench mixed --seeds 0": "Train a Llama in PyTorch beside our model in JAX."},
    "bench wire": {"archipelago bench wire --quick": "Measure payloads through Redis on this machine."},
    "bench merge": {"archipelago bench merge --quick": "Measure codecs, merges and many islands."},
    "bench sync": {
        "archipelago bench sync --quick": "Measure one synchronisation.",
        "archipelago bench sync --rule rda --pieces --merger-rtt-ms 20": "See what a merger far from its Redis costs.",
    },
    "bench accelerator": {
        "archipelago bench accelerator --quick": "Try the table of an accelerator on any machine.",
        "archipelago bench accelerator --sizes base --merge.rest rda": "Measure what syncing costs one model.",
        "archipelago bench accelerator --sizes small --parts start": "Measure what starting an island costs.",
    },
    "bench largest": {"archipelago bench largest --quick": "Send a large model through Redis."},
    "simulate plan": {
        "archipelago simulate plan --sites 3 --link-mbits 200": "Plan a run over three sites.",
        "archipelago simulate plan --task docs/examples/task_bytes.py --sites 3": "Plan a run of a task of yours.",
    },
    "simulate tables": {"archipelago simulate tables --days 2": "Compare with the published tables."},
}

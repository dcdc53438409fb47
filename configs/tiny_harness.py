"""An unmodified program plays the episodes: it asks the model over HTTP, from a sandbox, and each of its turns is trained on.

    python -m launch.train --config configs/tiny_harness.py

Hardware: any CPU, Linux that lets the user make namespaces. Time: about 90 seconds on 2 cores, two programs a core at once.
Expect: mean held-out reward (of at most 2.5) from 0.01 to 0.5, and the largest gap of log-probs 0.
"""

from ml_collections import ConfigDict

from configs import tiny

PROGRAM = """
import json, os, sys, urllib.request

question = {"role": "user", "content": sys.stdin.read()}
body = json.dumps({"model": "policy", "messages": [question]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(urllib.request.urlopen(urllib.request.Request(url, body, headers)).read())
"""


def get_config() -> ConfigDict:
    config = tiny.get_config()
    config.name = "tiny_harness"
    config.environment = {
        "kind": "harness",
        "renderer": "chatml",
        "options": {
            "tasks": "arithmetic",
            "task_options": {"max_value": 9, "weights": {"exact": 1.0, "right": 1.0, "digits": 0.5}},
            "command": ("python3", "/work/agent.py"),
            "files": (("agent.py", PROGRAM),),
        },
    }
    return config

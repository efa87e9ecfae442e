"""`halfmoon bench`: a load on any OpenAI endpoint, and the goodput that comes of it.

Pure: what to send and when (`lengths`, `plan`, `prompts`), what came (`record`, `summary`),
which rate to try next (`search`). Shells: `wire`, `asking`, `running`, `screen`, `files`, `plots`.
"""

"""Hold the demo model's chat template: turns as ChatML writes them, tools as Hermes calls them.

Tools end the system turn, `Tools:` and a line such as `get_room(name)` for each. A function's name
is written there as in a call, so the model only copies it.
"""

CHAT_TEMPLATE = """\
{%- set system = namespace(tools='') %}
{%- for tool in tools or [] %}
{%- set function = tool['function'] %}
{%- set names = ((function.get('parameters') or {}).get('properties') or {}) | list | join(', ') %}
{%- set system.tools = (system.tools or 'Tools:') + '\\n' + function['name'] + '(' + names + ')' %}
{%- endfor %}
{%- if system.tools and (not messages or messages[0]['role'] != 'system') %}
{{- '<|im_start|>system\\n' + system.tools + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] or [] %}
{%- if part['type'] == 'text' %}
{{- part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- for call in message['tool_calls'] or [] %}
{%- set given = call['function']['arguments'] %}
{{- '\\n' if message['content'] or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- (given if given is string else given | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{%- if system.tools and loop.first and message['role'] == 'system' %}
{{- '\\n' + system.tools }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

"""Chat templates that write tools in the forms of published models, without their words."""

from __future__ import annotations

QWEN = """{%- if tools %}<|s|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>
{% endif %}{%- for m in messages %}
{%- if m.role == "tool" %}<|s|>user
<tool_response>
{{ m.content }}
</tool_response><|end|>
{% else %}<|s|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|s|>assistant
{% endif %}"""

LLAMA = """{%- for m in messages %}<|s|>{{ m.role }}

{% if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}
{{- raise_exception("one call at once") }}{% endif %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters":
{{- ' ' }}{{ m.tool_calls[0].function.arguments | tojson }}}<|end|>{% else %}{{ m.content | trim }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|s|>assistant

{% endif %}"""

MISTRAL = """{%- for m in messages %}{% if m.role == "user" %}{% if tools %}[TOOLS]{{ tools | tojson }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}{% elif m.tool_calls %}[CALLS] [{% for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have 9 characters") }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}{% endfor %}]<|end|>
{%- elif m.role == "tool" %}[RESULT]{{ m.tool_call_id + ' ' + m.content }}[/RESULT]{% else %}
{{- ' ' + m.content | trim + '<|end|>' }}{% endif %}{% endfor %}"""

TEXT_ARGUMENTS = QWEN.replace("call.function.arguments | tojson", "call.function.arguments")
PLAIN = """{%- for m in messages %}<|s|>{{ m.role }}
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|s|>assistant
{% endif %}"""
XML = QWEN.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    "<function={{ call.function.name }}>{% for k, v in call.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}",
)
NO_RESULTS = QWEN.replace("{{ m.content }}\n</tool_response>", "</tool_response>")

"""Chat templates in the style of published ones, with what each of them uses of Jinja."""

from __future__ import annotations

LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = messages[0]['content'] %}
{% else %}
    {% set loop_messages = messages %}
    {% set system_message = false %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate: user, assistant, user, ...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
    {% elif message['role'] == 'assistant' %}
        {{- ' ' + content.strip() + ' ' + eos_token -}}
    {% endif %}
{% endfor %}
"""

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}\
{% endgeneration %}{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

MISTRAL = """\
{%- set ns = namespace(index=0, system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = message.content -%}
        {%- continue -%}
    {%- endif -%}
    {%- if message.role not in ['user', 'assistant'] -%}
        {{- raise_exception('Only user and assistant roles are supported, got ' + message.role) -}}
    {%- endif -%}
    {%- set ns.index = ns.index + 1 -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages | selectattr('role', 'ne', 'system') -%}
    {%- if message.role == 'user' -%}
        {{- '[INST] ' ~ (ns.system ~ '\\n\\n' if loop.last and ns.system else '') ~ message.content ~ '[/INST]' -}}
    {%- else -%}
        {{- ' ' ~ message.content ~ eos_token -}}
    {%- endif -%}
    {%- if loop.index >= 6 %}{% break %}{% endif -%}
{%- endfor -%}
"""

LLAMA_3 = """\
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{{- bos_token + "<|start_header_id|>system<|end_header_id|>\\n\\nYear: " + date_string }}
{%- if tools is not none %}{{ " with tools" }}{%- endif %}
{{- " <|eot_id|>" }}
{%- for message in messages %}
    {%- set header = dict(role=message.role, turn=loop.index) %}
    {{- "<|start_header_id|>" ~ header | tojson ~ "<|end_header_id|>\\n\\n" }}
    {{- message['content'] | trim ~ "<|eot_id|>" }}
    {{- header | tojson(indent=2) if loop.last }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""

STYLES = {"llama-2": LLAMA_2, "chatml": CHATML, "gemma": GEMMA, "mistral": MISTRAL, "llama-3": LLAMA_3}

"""What the chat templates of Qwen2.5 and Qwen3 say, in the parts that texts, thinking and calls need."""

HERMES = r"""
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
"""  # noqa: E501
RESULTS = r"""
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
"""
QWEN25 = rf"""
{{%- set system = messages[0].content if messages[0].role == 'system' else 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}}
{{%- if tools %}}
    {{{{- '<|im_start|>system\n' + system + '\n\n' }}}}
{HERMES}
{{%- else %}}
    {{{{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}}}
{{%- endif %}}
{{%- for message in messages %}}
    {{%- if message.role == "user" or (message.role == "system" and not loop.first) %}}
        {{{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}}}
    {{%- elif message.role == "assistant" %}}
        {{{{- '<|im_start|>assistant' }}}}
        {{%- if message.content %}}
            {{{{- '\n' + message.content }}}}
        {{%- endif %}}
        {{%- for tool_call in message.tool_calls or [] %}}
            {{{{- '\n<tool_call>\n{{"name": "' + tool_call.function.name + '", "arguments": ' }}}}
            {{{{- tool_call.function.arguments | tojson }}}}
            {{{{- '}}\n</tool_call>' }}}}
        {{%- endfor %}}
        {{{{- '<|im_end|>\n' }}}}
{RESULTS}
{{%- endif %}}
"""  # noqa: E501
QWEN3 = rf"""
{{%- if tools %}}
    {{{{- '<|im_start|>system\n' }}}}
    {{%- if messages[0].role == 'system' %}}
        {{{{- messages[0].content + '\n\n' }}}}
    {{%- endif %}}
{HERMES}
{{%- elif messages[0].role == 'system' %}}
    {{{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}}}
{{%- endif %}}
{{%- set ns = namespace(searching=true, last=messages | length - 1) %}}
{{%- for message in messages[::-1] %}}
    {{%- if ns.searching and message.role == "user" and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}}
        {{%- set ns.searching = false %}}
        {{%- set ns.last = messages | length - 1 - loop.index0 %}}
    {{%- endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
    {{%- if message.role == "user" or (message.role == "system" and not loop.first) %}}
        {{{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}}}
    {{%- elif message.role == "assistant" %}}
        {{%- set thinking = message.reasoning_content or '' %}}
        {{{{- '<|im_start|>assistant\n' }}}}
        {{%- if loop.index0 > ns.last and (loop.last or thinking) %}}
            {{{{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + message.content.lstrip('\n') }}}}
        {{%- else %}}
            {{{{- message.content }}}}
        {{%- endif %}}
        {{%- for tool_call in message.tool_calls or [] %}}
            {{%- if (loop.first and message.content) or (not loop.first) %}}
                {{{{- '\n' }}}}
            {{%- endif %}}
            {{{{- '<tool_call>\n{{"name": "' + tool_call.function.name + '", "arguments": ' }}}}
            {{{{- tool_call.function.arguments | tojson }}}}
            {{{{- '}}\n</tool_call>' }}}}
        {{%- endfor %}}
        {{{{- '<|im_end|>\n' }}}}
{RESULTS}
    {{%- if enable_thinking is defined and enable_thinking is false %}}
        {{{{- '<think>\n\n</think>\n\n' }}}}
    {{%- endif %}}
{{%- endif %}}
"""  # noqa: E501

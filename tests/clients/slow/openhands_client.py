"""Two turns of the unmodified OpenHands SDK: URL MODEL. Run by its own environment; prints the answers as JSON."""

import json
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.event import MessageEvent
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool

PROMPTS = ("please look around", "and now?")


def main(url: str, model: str) -> None:
    llm = LLM(model=model, base_url=url, api_key="none", num_retries=0)
    # tmux, its other terminal, is not everywhere, and its server outlives the program
    terminal = Tool(name=TerminalTool.name, params={"terminal_type": "subprocess"})
    agent = Agent(llm=llm, tools=[terminal, Tool(name=FileEditorTool.name)])
    conversation = Conversation(agent=agent, workspace=".", visualizer=None)
    for prompt in PROMPTS:
        conversation.send_message(prompt)
        conversation.run()
    said = [event for event in conversation.state.events if isinstance(event, MessageEvent) and event.source == "agent"]
    conversation.close()
    print(json.dumps([part.text for event in said for part in event.llm_message.content]))


if __name__ == "__main__":
    main(*sys.argv[1:])

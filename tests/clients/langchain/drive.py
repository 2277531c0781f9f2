"""Use a gateway as any program with `langchain-openai` does, with the variables of OpenAI's client."""

import asyncio
import json

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

MESSAGES = [SystemMessage("Be brief."), HumanMessage("hello")]


def main():
    model = ChatOpenAI(model="null", max_tokens=20, seed=7, max_retries=0)
    whole = model.invoke(MESSAGES)
    chunks = list(model.stream(MESSAGES, stream_usage=True))
    usage = next(chunk.usage_metadata for chunk in chunks if chunk.usage_metadata)
    chain = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{text}")]) | model
    several = [answer.content for answer in chain.batch([{"text": "hello"}, {"text": "hello"}])]
    responding = ChatOpenAI(model="null", max_tokens=20, use_responses_api=True, max_retries=0)
    first = responding.invoke(MESSAGES)
    second = responding.invoke([HumanMessage("go on")], previous_response_id=first.response_metadata["id"])
    facts = {
        "response": first.text,
        "continued": second.text,
        "streamed_response": "".join(chunk.text for chunk in responding.stream(MESSAGES)),
        "text": whole.content,
        "streamed": "".join(chunk.content for chunk in chunks),
        "awaited": asyncio.run(model.ainvoke(MESSAGES)).content,
        "several": several,
        "finish_reason": whole.response_metadata["finish_reason"],
        "usage": whole.usage_metadata["output_tokens"],
        "streamed_usage": usage["output_tokens"],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

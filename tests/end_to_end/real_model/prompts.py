# ruff: noqa: RUF001 - texts of many languages
"""What people ask a model, in eight languages and in code: fifty prompts."""

PROMPTS = (
    # English
    "What is the capital of France?",
    "Explain photosynthesis to a child in two sentences.",
    "Write a haiku about rivers.",
    "Count from 1 to 20.",
    "Who wrote 'Pride and Prejudice', and when?",
    "List three uses of a paperclip.",
    "Translate to French: 'Where is the railway station?'",
    "What's the difference between weather and climate?",
    "I feel a bit down today 😞. Any advice?",
    "Summarise: The quick brown fox jumps over the lazy dog; the dog doesn't mind.",
    "What is 17 * 23? Show the steps.",
    "  Leading spaces,\ttabs\nand\n\nblank lines: what do you see?  ",
    # German
    "Was ist die Hauptstadt von Österreich?",
    "Erkläre in einem Satz, warum der Himmel blau ist.",
    "Nenne drei Flüsse in Deutschland – und einen in der Schweiz.",
    "Übersetze ins Englische: „Die Straße ist heute gesperrt.“",
    "Schreibe ein kurzes Gedicht über den Herbst. 🍂",
    "Wie heißt der größte Planet unseres Sonnensystems?",
    # French
    "Quelle est la capitale de l'Italie ?",
    "Explique la photosynthèse en une phrase.",
    "Écris un court poème sur l'été à la mer. 🌊",
    "Traduis en anglais : « J'ai oublié mes clés chez ma sœur. »",
    "Combien font douze fois treize ?",
    "Cite trois œuvres de Molière.",
    # Spanish
    "¿Cuál es la capital de España?",
    "Explica qué es un volcán en dos frases.",
    "Escribe una frase con la palabra «mañana».",
    "¿Cuántos días tiene un año bisiesto?",
    "Traduce al inglés: «El niño comió una piña». 🍍",
    "Nombra tres países de América del Sur.",
    # Chinese
    "中国的首都是哪里？",
    "请用一句话解释什么是光合作用。",
    "写一首关于春天的短诗。🌸",
    "把下面的话翻译成英文：我今天很高兴。",
    "一年有多少天？",
    # Japanese and Korean
    "日本の首都はどこですか？",
    "「ありがとう」は英語で何と言いますか？",
    "短い俳句を書いてください。🗻",
    "안녕하세요! 한국의 수도는 어디인가요?",
    # Russian and Arabic
    "Какая столица России?",
    "Напиши одно предложение о зиме. ❄️",
    "ما هي عاصمة مصر؟",
    # Code and emoji
    "Write a Python function that returns the n-th Fibonacci number.",
    "What does `for (int i = 0; i < n; ++i) sum += a[i];` compute?",
    'Fix this JSON: {"name": "Ada", "age": 36,}',
    "Explain the regular expression ^[A-Z]{2}-\\d{4}$.",
    "SELECT name FROM users WHERE age > 30; -- what does it return?",
    "<b>Is this HTML?</b> &amp; what is it called?",
    "What do these mean: 👩‍💻 🏳️‍🌈 👍🏽 🇫🇷?",
    "Continue: 🙂 🙃 🙂 🙃 🙂",
)

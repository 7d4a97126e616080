"""`The answer is` in other languages: the last line of a text, whole, or nothing.

A line counts only if all of it is understood: words that conclude, the announcement, the value, the
end. So `La respuesta no es 12` and `La respuesta es 11 o 12` state nothing.
"""

from __future__ import annotations

import re

# Parts of the announcements in languages whose announcement may be ASCII.
_SIGNS = (
    *("espuesta", "oluci", "esultado", "ntwort", "rgebnis"),
    *("isposta", "isultato", "esposta"),
)
# Of a line with single spaces: runs of them would be tried in every way between the optional words.
_STATED = re.compile(
    r"(?:(?:por (?:lo )?tanto|entonces|luego|así(?: que)?|donc|ainsi|par conséquent|also|daher|"
    r"somit|"
    r"folglich|quindi|dunque|perciò|portanto|logo|итак|следовательно|таким образом|따라서|"
    r"그러므로|إذن|"
    r"لذلك|अतः|इसलिए|vậy),? )?"
    r"(?:la |el |le |die |das |der |il |o |a |l')?"
    r"(?:respuesta|solución|resultado|réponse|solution|résultat|antwort|lösung|ergebnis|risposta|"
    r"soluzione|risultato|resposta|solução|ответ|정답|답|الجواب|الإجابة|उत्तर|đáp án)"
    r"(?: (?:final|finale|correcta|correct|correcte|corretta|correta|النهائي|النهائية))? ?"
    r"(?:(?:est|es|ist|lautet|è|é|هو|هي|là)(?=[ :])|은|는|—|–|-)? ?"
    r"(?:(?:igual a|égale? à|uguale a|gleich)(?= ))? ?[:：=]? ?"
    r"(?P<value>[^ :：=][^?？]{0,80}?) ?(?:입니다|이다|है)? ?[.。।!]?",
    re.IGNORECASE,
)


def stated(text: str) -> str | None:
    """What the last line of a text announces as its answer, without markup; else None."""
    line = text[text.rfind("\n") + 1 :][-200:]
    if line.isascii():
        for sign in _SIGNS:
            if sign in line:
                break
        else:
            return None
    found = _STATED.fullmatch(" ".join(line.replace("*", "").split()))
    if found is None:
        return None
    value = found["value"].strip()
    for mark in ("$", "\\(", "\\)"):
        value = value.removeprefix(mark).removesuffix(mark)
    return value if any(sign.isdigit() or sign == "\\" for sign in value) else None

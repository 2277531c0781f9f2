/* Attention with bfloat16 elements. */
#include "attend.h"

void attend_bfloat16(const Attention *a, Team *team) { attend(a, team, BFLOAT16); }

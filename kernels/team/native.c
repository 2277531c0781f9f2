/* A persistent team of threads that run a step together. They are created once and kept, like OpenMP's.

   A sleeping thread takes up to a millisecond to wake on a virtual machine, a tenth of a step of few sequences; a
   spinning thread takes the core from other work. So a waiting thread spins for about as long as it takes to sample and
   to lay out the next step, and then sleeps. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#include <time.h>
#endif

#include "../parts.h"

#define SPINS 5000

/* State of the crew: written by the caller of run_team that holds `is_busy`. */
typedef struct {
  void (*work)(const void *argument, Team *team);
  const void *argument;
  int count;
} Task;

/* The caller and its helpers, each of which waits at its own signal. */
static struct {
  pthread_mutex_t is_busy;
  pid_t process; /* process that owns the threads: a fork has none */
  int num_helpers;
  Task task;
  Meeting meeting;
  Share shares[MAX_THREADS];
  Signal begun[MAX_THREADS]; /* one per helper; the caller's is unused */
} crew = {.is_busy = PTHREAD_MUTEX_INITIALIZER};

INLINE void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/* Sleep while the signal has the value that was seen, or for a short time. */
static void sleep_at(Signal *signal, int seen) {
#if defined(__linux__)
  __atomic_fetch_add(&signal->sleepers, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &signal->number, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
  __atomic_fetch_sub(&signal->sleepers, 1, __ATOMIC_SEQ_CST);
#else
  const struct timespec a_little = {0, 50000};
  (void)signal, (void)seen;
  nanosleep(&a_little, NULL);
#endif
}

void await_signal(Signal *signal, int seen) {
  for (int looks = 0; signal_number(signal) == seen; looks++) {
    if (looks < SPINS)
      relax();
    else
      sleep_at(signal, seen);
  }
}

/* A sleeper is counted before it checks the number for the last time, so no wake-up is missed. */
void give_signal(Signal *signal) {
  __atomic_fetch_add(&signal->number, 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  if (__atomic_load_n(&signal->sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &signal->number, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* One thread's part of the task; no thread leaves before all are done, and then touches nothing of it. */
static void take_part(int index) {
  const Task task = crew.task;
  Team team = {crew.shares, &crew.meeting, index, task.count, 0};
  task.work(task.argument, &team);
  meet(&crew.meeting, task.count);
}

static void *help(void *index) {
  const int own = (int)(intptr_t)index;
  for (int seen = 0;; seen++) {
    await_signal(&crew.begun[own], seen);
    take_part(own);
  }
  return NULL;
}

/* Make sure there are helpers for a team of `count`, or as many as possible; return the number of threads in the
   team. */
static int recruit(int count) {
  if (crew.process != getpid()) {
    crew.num_helpers = 0;
    memset(crew.begun, 0, sizeof crew.begun);
    crew.meeting = (Meeting){0};
    crew.process = getpid();
  }
  while (crew.num_helpers + 1 < count) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, help, (void *)(intptr_t)(crew.num_helpers + 1))) break;
    pthread_detach(thread);
    crew.num_helpers++;
  }
  return count < crew.num_helpers + 1 ? count : crew.num_helpers + 1;
}

/* A caller that finds the crew busy works alone: the result does not depend on the team. */
void run_team(void (*work)(const void *argument, Team *team), const void *argument, int num_threads) {
  if (num_threads < 2 || pthread_mutex_trylock(&crew.is_busy)) {
    Share share = {.taken = {0, 0}};
    Team alone = {&share, NULL, 0, 1, 0};
    work(argument, &alone);
    return;
  }
  const int count = recruit(num_threads < MAX_THREADS ? num_threads : MAX_THREADS);
  crew.task = (Task){work, argument, count};
  memset(crew.shares, 0, sizeof(Share) * count);
  for (int i = 1; i < count; i++) give_signal(&crew.begun[i]);
  take_part(0);
  pthread_mutex_unlock(&crew.is_busy);
}

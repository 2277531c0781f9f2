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
#define NAP_NS 250000

/* What the crew runs: written by the caller of run_team that holds `is_busy`, while nobody is inside. */
typedef struct {
  void (*work)(const void *argument, Team *team);
  const void *argument;
  int count, phase;
} Task;

#define CLOSED (-1)

/* The caller and its helpers, each of which waits at its own signal. */
static struct {
  pthread_mutex_t is_busy;
  pid_t process; /* process that owns the threads: a fork has none */
  int num_helpers;
  Task task;
  Progress progress;
  Share shares[MAX_THREADS];
  Signal begun[MAX_THREADS]; /* one per helper; the caller's is unused */
  int num_inside;            /* helpers that run the task, or CLOSED: a helper that comes too late is not waited for */
  Signal left;
} crew = {.is_busy = PTHREAD_MUTEX_INITIALIZER, .num_inside = CLOSED};

INLINE void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/* Sleep while the signal has the value that was seen, at most for a time if it is given. */
static void sleep_at(Signal *signal, int seen, const struct timespec *most) {
#if defined(__linux__)
  __atomic_fetch_add(&signal->sleepers, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &signal->number, FUTEX_WAIT_PRIVATE, seen, most, NULL, 0);
  __atomic_fetch_sub(&signal->sleepers, 1, __ATOMIC_SEQ_CST);
#else
  const struct timespec a_little = {0, 50000};
  (void)signal, (void)seen, (void)most;
  nanosleep(&a_little, NULL);
#endif
}

INLINE int await(Signal *signal, int seen, const struct timespec *most) {
  for (int looks = 0;; looks++) {
    const int number = signal_number(signal);
    if (number != seen) return number;
    if (looks < SPINS)
      relax();
    else
      sleep_at(signal, seen, most);
  }
}

/* Return the number that differs from the one that was seen. */
int await_signal(Signal *signal, int seen) { return await(signal, seen, NULL); }

/* The same within a step, for a thread that may be descheduled: each time that this core falls idle, the system looks
   for threads that wait for another core. It does not take one that ran within the last half millisecond, so this
   thread goes to sleep again and again. */
int await_signal_awake(Signal *signal, int seen) {
  const struct timespec nap = {0, NAP_NS};
  return await(signal, seen, &nap);
}

/* A sleeper is counted before it checks the number for the last time, so no wake-up is missed. */
void give_signal(Signal *signal) {
  __atomic_fetch_add(&signal->number, 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  if (__atomic_load_n(&signal->sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &signal->number, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
}

static void take_part(int index) {
  const Task task = crew.task;
  Team team = {crew.shares, &crew.progress, index, task.count, task.phase, 0, 0};
  task.work(task.argument, &team);
}

/* Enter the task unless it is closed. */
static int enter(void) {
  int inside = __atomic_load_n(&crew.num_inside, __ATOMIC_ACQUIRE);
  while (inside != CLOSED)
    if (__atomic_compare_exchange_n(&crew.num_inside, &inside, inside + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
      return 1;
  return 0;
}

static void leave(void) {
  __atomic_sub_fetch(&crew.num_inside, 1, __ATOMIC_ACQ_REL);
  give_signal(&crew.left);
}

/* Wait until no helper is inside, and let none in: then what they read may go. */
static void close_task(void) {
  for (;;) {
    const int seen = signal_number(&crew.left);
    int nobody = 0;
    if (__atomic_compare_exchange_n(&crew.num_inside, &nobody, CLOSED, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return;
    await_signal_awake(&crew.left, seen);
  }
}

static void *help(void *index) {
  const int own = (int)(intptr_t)index;
  for (int seen = 0;;) {
    seen = await_signal(&crew.begun[own], seen);
    if (!enter()) continue;
    /* A helper that comes late may find the task of a smaller team. */
    if (own < crew.task.count) take_part(own);
    leave();
  }
  return NULL;
}

/* Make sure there are helpers for a team of `count`, or as many as possible; return the number of threads in the
   team. */
static int recruit(int count) {
  if (crew.process != getpid()) {
    crew.num_helpers = 0;
    memset(crew.begun, 0, sizeof crew.begun);
    crew.progress.phase.sleepers = crew.left.sleepers = 0;
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
    Share share = {.taken = 0};
    Team alone = {&share, NULL, 0, 1, 0, 0, 0};
    work(argument, &alone);
    return;
  }
  const int count = recruit(num_threads < MAX_THREADS ? num_threads : MAX_THREADS);
  /* The shares' counts are of earlier phases. */
  crew.task = (Task){work, argument, count, ++crew.progress.phase.number};
  __atomic_store_n(&crew.num_inside, 0, __ATOMIC_RELEASE);
  for (int i = 1; i < count; i++) give_signal(&crew.begun[i]);
  take_part(0);
  close_task();
  pthread_mutex_unlock(&crew.is_busy);
}

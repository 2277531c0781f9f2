/* A persistent team of threads that run a step together. They are created once and kept, like OpenMP's.

   A sleeping thread takes up to a millisecond to wake on a virtual machine, a tenth of a step of few sequences; a
   spinning thread takes the core from other work. So a waiting thread spins for about as long as it takes to sample and
   to lay out the next step, and then sleeps. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

#include "../parts.h"

#define SPINS 5000
#define NAP_NS 250000
#define LOOKS 500     /* about ten microseconds */
#define MOVED_NS 1000 /* less than that means not at all: reading the clock is not exact */

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
  pthread_t threads[MAX_THREADS];
  Signal begun[MAX_THREADS]; /* one per helper; the caller's is unused */
  int num_inside;            /* helpers that run the task, or CLOSED: a helper that comes too late is not waited for */
  Signal left;
  int is_moving; /* a thread moves threads to other cores */
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

/* The same at the end of a step, while others may be descheduled: each time that this core falls idle, the system looks
   for threads that wait for another core. It does not take one that ran within the last half millisecond, so this
   thread goes to sleep again and again. */
static int await_signal_awake(Signal *signal, int seen) {
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

/* The thread takes its first task of the phase: others may wait for it now. */
void begin_work(const Team *team) {
  Share *own = team->shares + team->index;
#if defined(__linux__)
  __atomic_store_n(&own->cpu, sched_getcpu(), __ATOMIC_RELAXED);
#endif
  __atomic_store_n(&own->working_in, team->phase, __ATOMIC_RELEASE);
}

#if defined(__linux__)
static int64_t processor_ns(pthread_t thread) {
  clockid_t clock;
  struct timespec time;
  if (pthread_getcpuclockid(thread, &clock) || clock_gettime(clock, &time)) return 0;
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Whether a thread has no core: for some microseconds its processor time does not grow. */
static int is_descheduled(pthread_t thread) {
  const int64_t before = processor_ns(thread);
  for (int looks = 0; looks < LOOKS; looks++) relax();
  return processor_ns(thread) - before < MOVED_NS;
}

/* Move a thread to one core, or away from it, if it may run there; afterwards it is as free as before. */
static void move(pid_t thread, int core, int away) {
  cpu_set_t former, cores;
  if (sched_getaffinity(thread, sizeof former, &former) || !CPU_ISSET(core, &former)) return;
  cores = former;
  if (away) {
    CPU_CLR(core, &cores);
  } else {
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
  }
  if (CPU_COUNT(&cores) && !sched_setaffinity(thread, sizeof cores, &cores))
    sched_setaffinity(thread, sizeof former, &former);
}

/* Give this core, which the caller does not need now, to a thread that waits for its own; take that one. One thread at a
   time does so: another would take the cores of a move for those where the thread may run, and leave it there. */
static void change_cores(const Share *late) {
  if (__atomic_exchange_n(&crew.is_moving, 1, __ATOMIC_ACQUIRE)) return;
  const int core = sched_getcpu(), other = __atomic_load_n(&late->cpu, __ATOMIC_RELAXED);
  if (other != core) move(late->thread, core, 0);
  move(0, other, other == core);
  __atomic_store_n(&crew.is_moving, 0, __ATOMIC_RELEASE);
}

/* Change cores with one whose task this phase waits for, if such a one is descheduled. The system would leave it where
   it is until this core falls idle, and then leave both on this core, with the neighbour alone on the other. */
static void help_the_late(const Team *team) {
  for (int i = 0; i < team->count; i++) {
    const Share *late = team->shares + i;
    if (i == team->index || __atomic_load_n(&late->working_in, __ATOMIC_ACQUIRE) != team->phase) continue;
    if (!is_descheduled(crew.threads[i])) continue;
    if (signal_number(&team->progress->phase) == team->phase) change_cores(late);
    return;
  }
}
#else
static void help_the_late(const Team *team) { (void)team; }
#endif

/* Wait for the end of the phase. */
void await_phase(const Team *team) {
  const struct timespec nap = {0, NAP_NS};
  Signal *signal = &team->progress->phase;
  for (int looks = 0; signal_number(signal) == team->phase; looks++) {
    if (looks < SPINS) {
      relax();
      continue;
    }
    help_the_late(team);
    sleep_at(signal, team->phase, &nap);
  }
}

static void take_part(int index) {
#if defined(__linux__)
  crew.shares[index].thread = (int)syscall(SYS_gettid);
#endif
  crew.shares[index].working_in = NO_PHASE;
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
    crew.progress.phase.sleepers = crew.left.sleepers = crew.is_moving = 0;
    crew.process = getpid();
  }
  while (crew.num_helpers + 1 < count) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, help, (void *)(intptr_t)(crew.num_helpers + 1))) break;
    pthread_detach(thread);
    crew.threads[crew.num_helpers + 1] = thread;
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
  crew.threads[0] = pthread_self();
  crew.task = (Task){work, argument, count, ++crew.progress.phase.number};
  __atomic_store_n(&crew.num_inside, 0, __ATOMIC_RELEASE);
  for (int i = 1; i < count; i++) give_signal(&crew.begun[i]);
  take_part(0);
  close_task();
  pthread_mutex_unlock(&crew.is_busy);
}

"""Filters system calls with seccomp: a BPF program written by hand, for Linux on x86-64 and arm64.

System call numbers are those of the kernel's asm/unistd.h; the program's form is that of man 2 seccomp.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_CLONE_THREAD = 0x00010000
_CLONE_APART = 0x7E020000
"""Flags of clone that make namespaces."""
_X32 = 0x40000000
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_ABSENT = -1
DENIED = {
    # network
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "accept4": (288, 242),
    "bind": (49, 200),
    "listen": (50, 201),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "sendmmsg": (307, 269),
    "recvmmsg": (299, 243),
    # processes
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "unshare": (272, 97),
    "setns": (308, 268),
    # memory
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "userfaultfd": (323, 282),
    # mounts
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # kernel
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "acct": (163, 89),
    "syslog": (103, 116),
    "personality": (135, 92),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    # time
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
}
"""Numbers on x86-64 and arm64. io_uring would open sockets past this filter. socketpair stays: asyncio needs it. Signals could
only go to the program itself; where there is no PID namespace they would go further. ptrace and its like, shared memory (which no
limit counts), mounts, keys and clocks are nothing that an answer needs."""


_NETWORK = (
    "socket",
    "connect",
    "accept",
    "accept4",
    "bind",
    "listen",
    "sendto",
    "sendmsg",
    "recvmsg",
    "sendmmsg",
    "recvmmsg",
)
_SIGNALS = ("pidfd_open", "pidfd_send_signal", "kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
AGENT = frozenset((*_NETWORK, *_SIGNALS, "fork", "vfork", "execve", "execveat", "setpriority"))
"""Calls of those above that a program gets which starts others and has a network of its own."""
_FAMILIES = (1, 2, 10, 16)
"""Its sockets: Unix, IPv4, IPv6, netlink. Not vsock, which leads out of a virtual machine past every network namespace."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def supported() -> bool:
    """Say if there is a filter for this machine."""
    return platform.machine() in _ARCHES


def program(machine: str, *, agent: bool = False) -> bytes:
    """Return the filter: denied calls fail with EPERM, new processes with EAGAIN; threads and everything else are allowed.

    With `agent`, the calls of AGENT are allowed, and processes that make no namespace.
    """
    column = list(_ARCHES).index(machine)
    names = DENIED.keys() - (AGENT if agent else ())
    denied = sorted(DENIED[name][column] for name in names if DENIED[name][column] != _ABSENT)
    code = [(_LD, 0, 0, _ARCH), (_JEQ, 1, 0, _ARCHES[machine]), (_RET, 0, 0, _KILL), (_LD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        code += [(_JGE, 0, 1, _X32), (_RET, 0, 0, _ERRNO | errno.EPERM)]
    for number in denied:
        code += [(_JEQ, 0, 1, number), (_RET, 0, 0, _ERRNO | errno.EPERM)]
    # glibc takes "there is no clone3" as a reason to use clone, whose flags can be looked at.
    code += [(_JEQ, 0, 1, _CLONE3), (_RET, 0, 0, _ERRNO | errno.ENOSYS)]
    argument = (_LD, 0, 0, _FIRST_ARGUMENT)
    if agent:
        code += [
            (_JEQ, 0, 3, _CLONE[machine]),
            argument,
            (_JSET, 0, 1, _CLONE_APART),
            (_RET, 0, 0, _ERRNO | errno.EPERM),
        ]
        code += [(_LD, 0, 0, _NUMBER), (_JEQ, 0, 2 + len(_FAMILIES), DENIED["socket"][column]), argument]
        code += [(_JEQ, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
        code += [(_RET, 0, 0, _ERRNO | errno.EAFNOSUPPORT)]
    else:
        code += [(_JEQ, 0, 3, _CLONE[machine]), argument, (_JSET, 1, 0, _CLONE_THREAD)]
        code += [(_RET, 0, 0, _ERRNO | errno.EAGAIN)]
    code += [(_RET, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def install(libc: ctypes.CDLL, filter: bytes) -> None:
    """Filter this process's calls for good. Raises OSError if the kernel refuses."""
    loaded = _Program(len(filter) // 8, filter)
    for option, value, pointer in ((_SET_NO_NEW_PRIVS, 1, None), (_SET_SECCOMP, _FILTER, ctypes.byref(loaded))):
        if libc.prctl(option, value, pointer, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, f"prctl {option}: {errno.errorcode.get(number, number)}")
